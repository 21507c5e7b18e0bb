"""LOHA: the delta is the elementwise product of two matrices of low rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loramux.adapters.peft.types.configs import LohaConfig
from loramux.adapters.peft.types.linear import LinearRule, LowRank, Targets, Tensors
from loramux.adapters.peft.types.lycoris import strengths
from loramux.adapters.peft.types.matching import Shape
from loramux.types.model import BaseModelInfo, TargetModule

PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


class LohaRule(LinearRule):
    def __init__(self, config: LohaConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._strengths = strengths(config, targets)

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        r = self._strengths[target.path].r
        sides = ((target.out_features, r), (r, target.in_features)) * 2
        return dict(zip(PARTS, sides, strict=True))

    def rank(self, target: TargetModule) -> int:
        return self._strengths[target.path].r ** 2

    def low_rank(self, target: TargetModule, tensors: Tensors) -> LowRank:
        """Return the Khatri-Rao products of the columns of a and of the rows of b."""
        a1, b1, a2, b2 = (tensors[part] for part in PARTS)
        return LowRank(
            a=(b1[:, None] * b2[None]).flatten(0, 1),
            b=(a1[:, :, None] * a2[:, None]).flatten(1),
            scale=self._strengths[target.path].scale,
        )

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        a1, b1, a2, b2 = (tensors[part] for part in PARTS)
        return base + (a1 @ b1) * (a2 @ b2) * self._strengths[target.path].scale
