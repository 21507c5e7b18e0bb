"""MISS: the inputs are summed over blocks of r, and one matrix maps the sums to the output."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.types.configs import MissConfig
from loramux.adapters.peft.types.linear import LinearRule, LowRank, Targets, Tensors
from loramux.adapters.peft.types.matching import Shape
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule

BLOCK = "miss_block"


class MissRule(LinearRule):
    has_native_rank = True

    def __init__(self, config: MissConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._config = config
        r, variant, mini_r = config.r, config.variant, config.mini_r
        for target in targets:
            sides = target.in_features, target.out_features
            misfits = {
                "": r > sides[0],
                "bat": r > sides[0] or any(side % r for side in sides),
                "mini": r > sides[0] or bool(mini_r and sides[1] % mini_r),
            }
            if misfits[variant]:
                raise AdapterRefused(
                    RefusalCode.BAD_VALUE,
                    f"{target.path} takes {sides[0]} and gives {sides[1]} features, which r = {r}"
                    f"{f' and mini_r = {mini_r}' if mini_r else ''} cannot divide.",
                    fix="Serve the adapter on the base that it was trained on.",
                )

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        r = self._config.r
        match self._config.variant:
            case "bat":
                return {BLOCK: (target.out_features // r, r, r)}
            case "mini":
                return {BLOCK: (r, self._config.mini_r)}
        return {BLOCK: (r, target.out_features)}

    def rank(self, target: TargetModule) -> int | None:
        """In "bat" blocks of the base's weight are multiplied, which has full rank."""
        return None if self._config.variant == "bat" else self._config.r

    def low_rank(self, target: TargetModule, tensors: Tensors) -> LowRank:
        r, block = self._config.r, tensors[BLOCK]
        if self._config.variant == "mini":
            block = block.repeat(1, target.out_features // self._config.mini_r)
        repeats = -(-target.in_features // r)
        return LowRank(a=torch.eye(r).repeat(1, repeats)[:, : target.in_features], b=block.T)

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        if self._config.variant != "bat":
            return super().weight(target, tensors, base)
        r, block = self._config.r, tensors[BLOCK]
        tiles = base.reshape(base.shape[0] // r, r, base.shape[1] // r, r).permute(2, 0, 1, 3)
        return base + (tiles @ block + block).permute(1, 2, 0, 3).reshape(base.shape)
