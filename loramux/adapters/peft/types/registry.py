"""The plan of an adapter of each served PEFT type other than LORA."""

from __future__ import annotations

from collections.abc import Callable

from loramux.adapters.peft.parts import AdapterPlan
from loramux.adapters.peft.types.adalora import AdaLoraRule
from loramux.adapters.peft.types.configs import (
    AdaLoraConfig,
    BeftConfig,
    BoftConfig,
    HraConfig,
    Ia3Config,
    LnTuningConfig,
    LohaConfig,
    LokrConfig,
    MissConfig,
    OftConfig,
    TypeConfig,
    VeraConfig,
)
from loramux.adapters.peft.types.linear import LinearPlan, LinearRule
from loramux.adapters.peft.types.ln_tuning import plan_norms
from loramux.adapters.peft.types.loha import LohaRule
from loramux.adapters.peft.types.lokr import LokrRule
from loramux.adapters.peft.types.matching import linear_targets
from loramux.adapters.peft.types.miss import MissRule
from loramux.adapters.peft.types.rotations import BoftRule, HraRule, OftRule
from loramux.adapters.peft.types.vectors import BeftRule, Ia3Rule
from loramux.adapters.peft.types.vera import VeraRule
from loramux.types.model import BaseModelInfo

RULES: dict[type[TypeConfig], Callable[..., LinearRule]] = {
    AdaLoraConfig: AdaLoraRule,
    BeftConfig: BeftRule,
    BoftConfig: BoftRule,
    HraConfig: HraRule,
    Ia3Config: Ia3Rule,
    LohaConfig: LohaRule,
    LokrConfig: LokrRule,
    MissConfig: MissRule,
    OftConfig: OftRule,
    VeraConfig: VeraRule,
}
"""Each takes the config, the targets and the base."""


def plan_type(config: TypeConfig, base: BaseModelInfo) -> AdapterPlan:
    """Find what the config targets on this base; raise AdapterRefused."""
    if isinstance(config, LnTuningConfig):
        return plan_norms(config, base)
    targets = linear_targets(config, base)
    return LinearPlan(RULES[type(config)](config, targets, base), targets, base)
