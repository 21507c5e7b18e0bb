"""Gains and biases of the fused linears: DoRA magnitudes, trained biases, biases of lora_B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from loramux.adapters.packed.extras import ExtraKind, ExtraSpec
from loramux.adapters.peft.making import PartValues
from loramux.adapters.peft.parts import BaseWeights, ExtraTensor
from loramux.adapters.peft.safetensors import TensorEntry


@dataclass(frozen=True, slots=True)
class Columns:
    """What changes in the columns of one projection beside its low rank."""

    path: str
    projection: str
    start: int
    width: int
    has_factors: bool
    """Whether DoRA scales them."""
    is_biased: bool
    """Whether the base has a bias there."""
    bias: TensorEntry | None = None
    """Replaces the bias of the base."""
    lora_bias: TensorEntry | None = None
    """The bias of lora_B."""
    lora_scale: float = 0.0

    @property
    def changes_bias(self) -> bool:
        return (
            self.bias is not None
            or self.lora_bias is not None
            or (self.has_factors and self.is_biased)
        )

    @property
    def reads_base(self) -> bool:
        return self.is_biased and (self.has_factors or self.bias is not None)

    def bias_change(self, values: PartValues, layer: int) -> torch.Tensor:
        """Return what is added to y * (1 + gain), where y holds the bias of the base."""
        change = torch.zeros(self.width)
        if self.reads_base and values.base is not None:
            base = _bias(values.base, layer, self.projection)
            factors = values.factors.get(self.path)
            kept = base if self.bias is None else values.of(self.bias).float()
            change += kept - (base if factors is None else base * factors)
        elif self.bias is not None:
            change += values.of(self.bias).float()
        if self.lora_bias is not None:
            change += self.lora_scale * values.of(self.lora_bias).float()
        return change


@dataclass(frozen=True, slots=True)
class FusedMaker:
    """The gain and the bias of one fused linear of one layer."""

    layer: int
    linear: str
    width: int
    columns: tuple[Columns, ...]

    @property
    def specs(self) -> tuple[ExtraSpec, ...]:
        kinds = []
        if any(part.has_factors for part in self.columns):
            kinds.append(ExtraKind.GAIN)
        if any(part.changes_bias for part in self.columns):
            kinds.append(ExtraKind.BIAS)
        return tuple(ExtraSpec(self.layer, self.linear, kind, 1, self.width) for kind in kinds)

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        found = (entry for part in self.columns for entry in (part.bias, part.lora_bias))
        return tuple(entry for entry in found if entry is not None)

    @property
    def computes(self) -> bool:
        return True

    def make(self, values: PartValues) -> Iterator[ExtraTensor]:
        for spec in self.specs:
            is_gain = spec.kind is ExtraKind.GAIN
            reads_base = is_gain or any(part.reads_base for part in self.columns)
            if reads_base and values.base is None:
                continue
            row = torch.zeros(self.width)
            for part in self.columns:
                piece = row[part.start : part.start + part.width]
                if not is_gain:
                    piece += part.bias_change(values, self.layer)
                elif part.has_factors:
                    piece += values.factors[part.path] - 1
            yield ExtraTensor(spec.key, row.view(1, -1))


def _bias(base: BaseWeights, layer: int, projection: str) -> torch.Tensor:
    bias = base.bias(layer, projection)
    assert bias is not None
    return bias.float().cpu()
