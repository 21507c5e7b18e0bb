"""ADALORA: low rank with a diagonal between A and B, and a rank that training left to each."""

from __future__ import annotations

from collections.abc import Mapping

from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.types.configs import AdaLoraConfig
from loramux.adapters.peft.types.linear import LinearRule, LowRank, Targets, Tensors
from loramux.adapters.peft.types.matching import Shape
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule

# PEFT adds it to the rank before it divides by it.
RANK_EPSILON = 1e-5


class AdaLoraRule(LinearRule):
    has_native_rank = True

    def __init__(self, config: AdaLoraConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._config = config
        # Older versions of PEFT wrote the name of the adapter behind that of the parameter.
        named = {
            name.removesuffix(".default").removesuffix(".lora_E"): rank
            for name, rank in config.ranks
        }
        if unknown := sorted(named.keys() - {target.path for target in targets}):
            raise AdapterRefused(
                RefusalCode.BAD_VALUE,
                f"rank_pattern names modules that are not targeted: {name_some(unknown)}.",
                fix="Correct it in adapter_config.json, or serve the adapter on its own base.",
            )
        self._ranks = {target.path: named.get(target.path, config.init_r) for target in targets}

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        rank = self._ranks[target.path]
        return {
            "lora_A": (rank, target.in_features),
            "lora_B": (target.out_features, rank),
            "lora_E": (rank, 1),
        }

    def rank(self, target: TargetModule) -> int:
        return self._ranks[target.path]

    def low_rank(self, target: TargetModule, tensors: Tensors) -> LowRank:
        """PEFT divides by the rank before training removed any."""
        config = self._config
        alpha = config.lora_alpha if config.lora_alpha > 0 else self._ranks[target.path]
        return LowRank(
            a=tensors["lora_A"] * tensors["lora_E"],
            b=tensors["lora_B"],
            scale=alpha / (config.init_r + RANK_EPSILON),
        )
