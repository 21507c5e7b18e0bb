"""LN_TUNING: norms with retrained weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loramux.adapters.packed.extras import ExtraKind, ExtraSpec
from loramux.adapters.peft.parts import AdapterParts, BaseWeights, ExtraTensor
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.adapters.peft.saved_modules import norm_paths
from loramux.adapters.peft.targets import targeted_paths
from loramux.adapters.peft.types.configs import LnTuningConfig
from loramux.adapters.peft.types.linear import check_finite, no_effect
from loramux.adapters.peft.types.matching import (
    MODULE_PREFIX,
    Expected,
    match_entries,
    no_targets,
)
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo

PART = "ln_tuning_layers.weight"


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the base that adapters can change."""

    path: str
    layer: int
    name: str


@dataclass(frozen=True, slots=True)
class NormPlan:
    """The norms that a config targets; other norms of the base are refused by their tensors."""

    norms: tuple[Norm, ...]
    base: BaseModelInfo

    def match(self, entries: Sequence[TensorEntry], *, max_rank: int | None) -> NormContents:
        shape = (self.base.hidden_size,)
        expected = {
            f"{MODULE_PREFIX}{norm.path}.{PART}": Expected(norm.path, shape) for norm in self.norms
        }
        found = match_entries(entries, expected, self.base)
        return NormContents(
            norms=self.norms,
            used=tuple(found[name] for name in expected),
            width=self.base.hidden_size,
            stored_offset=1.0 if self.base.norm_plus_one else 0.0,
        )


@dataclass(frozen=True, slots=True)
class NormContents:
    norms: tuple[Norm, ...]
    used: tuple[TensorEntry, ...]
    """The weight of each norm."""
    width: int
    stored_offset: float
    """What the model adds to a stored weight."""
    unused: tuple[str, ...] = ()
    only_alone: str = ""
    warnings: tuple[str, ...] = ()
    are_views: bool = False

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        return {}

    @property
    def extras(self) -> tuple[ExtraSpec, ...]:
        return tuple(
            ExtraSpec(norm.layer, norm.name, ExtraKind.GAIN, 1, self.width) for norm in self.norms
        )

    def make_parts(
        self, tensors: Mapping[str, torch.Tensor], base_weights: BaseWeights | None
    ) -> AdapterParts:
        if base_weights is None:
            return AdapterParts(())
        gains = []
        for norm, entry in zip(self.norms, self.used, strict=True):
            trained = tensors[entry.name].float() + self.stored_offset
            base = base_weights.norm(norm.layer, norm.name)
            gain = gain_of(norm, trained, base.detach().to(device="cpu", dtype=torch.float32))
            key = (norm.layer, norm.name, ExtraKind.GAIN)
            gains.append(check_finite(ExtraTensor(key, gain[None])))
        if not any(bool(gain.values.count_nonzero()) for gain in gains):
            raise no_effect()
        return AdapterParts((), tuple(gains))


def gain_of(norm: Norm, trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return trained / base - 1, which is 0 where both are 0."""
    is_zero = base == 0
    if (is_zero & (trained != 0)).any():
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_TARGET,
            f"{norm.path} has weights that are 0 in the base and not in the adapter, which no "
            "factor can express.",
            fix="Merge the adapter into the base, or train it without this norm.",
        )
    # A difference is exact where the two are near, and a quotient is not.
    return torch.where(is_zero, 0, (trained - base) / base.where(~is_zero, 1))


def plan_norms(config: LnTuningConfig, base: BaseModelInfo) -> NormPlan:
    norms = norms_of(base)
    wanted = targeted_paths(config, [norm.path for norm in norms])
    if not wanted:
        raise no_targets(config)
    return NormPlan(tuple(norm for norm in norms if norm.path in wanted), base)


def norms_of(base: BaseModelInfo) -> tuple[Norm, ...]:
    return tuple(Norm(path, layer, name) for path, (layer, name) in norm_paths(base).items())
