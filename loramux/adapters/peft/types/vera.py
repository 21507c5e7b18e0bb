"""VERA: two random matrices that all modules share, with a trained scale of each rank and row."""

from __future__ import annotations

from collections.abc import Mapping

from loramux.adapters.peft.types.configs import VeraConfig
from loramux.adapters.peft.types.linear import LinearRule, LowRank, Targets, Tensors
from loramux.adapters.peft.types.matching import Shape
from loramux.types.model import BaseModelInfo, TargetModule

SHARED_A, SHARED_B = "base_model.vera_A", "base_model.vera_B"


class VeraRule(LinearRule):
    has_native_rank = True

    def __init__(self, config: VeraConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._r = config.r

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        return {"vera_lambda_b": (target.out_features,), "vera_lambda_d": (self._r,)}

    def shared_shapes(self, targets: Targets) -> Mapping[str, Shape]:
        return {
            SHARED_A: (self._r, max(target.in_features for target in targets)),
            SHARED_B: (max(target.out_features for target in targets), self._r),
        }

    def rank(self, target: TargetModule) -> int:
        return self._r

    def low_rank(self, target: TargetModule, tensors: Tensors) -> LowRank:
        a = tensors[SHARED_A][:, : target.in_features]
        b = tensors[SHARED_B][: target.out_features]
        return LowRank(
            a=tensors["vera_lambda_d"][:, None] * a, b=tensors["vera_lambda_b"][:, None] * b
        )
