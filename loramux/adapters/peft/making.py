"""What makes the parts of an adapter beside low rank from the tensors of its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loramux.adapters.packed.extras import ExtraSpec
from loramux.adapters.peft.parts import BaseWeights, ExtraTensor
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.errors import AdapterRefused

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class PartValues:
    """The values that parts are made from."""

    tensors: Mapping[str, torch.Tensor]
    base: BaseWeights | None
    """None: parts that are computed from the base are not made."""
    factors: Mapping[str, torch.Tensor]
    """The DoRA factor of each output row, by module path; empty without base."""

    def of(self, entry: TensorEntry) -> torch.Tensor:
        return self.tensors[entry.name]


class PartMaker(Protocol):
    """Makes some parts of an adapter."""

    @property
    def specs(self) -> tuple[ExtraSpec, ...]:
        """The parts, as the config and the header show them."""
        ...

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        """The tensors of the file that become part of them."""
        ...

    @property
    def computes(self) -> bool:
        """Whether it reads values, so that they must be in memory."""
        ...

    def make(self, values: PartValues) -> Iterator[ExtraTensor]: ...


@dataclass(frozen=True, slots=True)
class WeightMaker:
    """A whole weight that is used as it is in the file."""

    spec: ExtraSpec
    entry: TensorEntry

    @property
    def specs(self) -> tuple[ExtraSpec, ...]:
        return (self.spec,)

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        return (self.entry,)

    @property
    def computes(self) -> bool:
        return False

    def make(self, values: PartValues) -> Iterator[ExtraTensor]:
        yield ExtraTensor(self.spec.key, values.of(self.entry))


def check_matrix(entry: TensorEntry, shape: tuple[int, ...], path: str) -> None:
    """Refuses a tensor of another shape than the base's module has."""
    if 0 in entry.shape:
        raise AdapterRefused(
            RefusalCode.EMPTY_TENSOR,
            f"{entry.name} has shape {list(entry.shape)}.",
            fix="Gather the shards (ZeRO-3, FSDP) before save_pretrained.",
        )
    if entry.shape != shape:
        raise AdapterRefused(
            RefusalCode.WRONG_SHAPE,
            f"{path} has shape {list(shape)} in this base, and {entry.name} has "
            f"{list(entry.shape)}.",
            fix="Serve the adapter on the base that it was trained on.",
        )
