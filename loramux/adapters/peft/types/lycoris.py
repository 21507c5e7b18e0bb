"""Rank and scale of modules for LOHA and LOKR, which share their config fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.adapters.peft.targets import values_by_pattern
from loramux.adapters.peft.types.configs import LohaConfig, LokrConfig
from loramux.types.model import TargetModule


@dataclass(frozen=True, slots=True)
class Strength:
    """The rank that the config gives a module, and the factor of its delta."""

    r: int
    scale: float


def strengths(
    config: LohaConfig | LokrConfig, targets: Sequence[TargetModule]
) -> dict[str, Strength]:
    paths = [target.path for target in targets]
    ranks = values_by_pattern("rank_pattern", config.rank_pattern, paths)
    alphas = values_by_pattern("alpha_pattern", config.alpha_pattern, paths)
    found = {}
    for path, rank, alpha in zip(paths, ranks, alphas, strict=True):
        r = config.r if rank is None else rank
        found[path] = Strength(r, (config.alpha if alpha is None else alpha) / r)
    return found
