"""IA3 and BEFT: a vector for each module, which scales its output or input, or is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from loramux.adapters.packed.extras import ExtraKind
from loramux.adapters.peft.patterns import first_matches
from loramux.adapters.peft.targets import spelled_path
from loramux.adapters.peft.types.configs import BeftConfig, Ia3Config
from loramux.adapters.peft.types.linear import (
    LinearRule,
    Targets,
    Tensors,
    VectorPlace,
    column_place,
    up_place,
)
from loramux.adapters.peft.types.matching import Shape
from loramux.types.model import BaseModelInfo, TargetModule

SCALE = "ia3_l"
ADDED = "beft_bias"


class Ia3Rule(LinearRule):
    """Scales outputs, and the inputs of feedforward modules.

    The input of down_proj is act(gate) * up, so that its scale is one of the output of up_proj.
    """

    def __init__(self, config: Ia3Config, targets: Targets, base: BaseModelInfo) -> None:
        self._base = base
        self._feedforward: set[str] = set()
        for prefix in base.path_prefixes:
            spelled = {spelled_path(target.path, prefix): target.path for target in targets}
            found = feedforward_paths(config.feedforward_modules, list(spelled))
            self._feedforward |= {spelled[path] for path in found}

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        if target.path in self._feedforward:
            return {SCALE: (1, target.in_features)}
        return {SCALE: (target.out_features, 1)}

    def place(self, target: TargetModule) -> VectorPlace | None:
        if target.path not in self._feedforward:
            return column_place(self._base, target.projection, ExtraKind.GAIN)
        if target.projection == "down_proj":
            return up_place(self._base, ExtraKind.GAIN)
        return None

    def vector(self, tensors: Tensors) -> torch.Tensor:
        return tensors[SCALE].flatten()

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        return base * tensors[SCALE]


def feedforward_paths(names: tuple[str, ...] | str, paths: Sequence[str]) -> set[str]:
    """Return the paths of feedforward modules; as in PEFT, a name may end inside a path part."""
    if isinstance(names, str):
        hits = first_matches("feedforward_modules", [names], paths, whole=True)
        return {path for path, hit in zip(paths, hits, strict=True) if hit is not None}
    return {path for path in paths if path.endswith(names)}


class BeftRule(LinearRule):
    """Adds a bias to outputs."""

    def __init__(self, config: BeftConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._base = base

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        return {ADDED: (1, target.out_features)}

    def place(self, target: TargetModule) -> VectorPlace:
        return column_place(self._base, target.projection, ExtraKind.BIAS)

    def vector(self, tensors: Tensors) -> torch.Tensor:
        return tensors[ADDED].flatten()
