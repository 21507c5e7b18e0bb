"""What an adapter folder consists of once it is read: low-rank modules and other parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loramux.adapters.packed.extras import ExtraKey, ExtraSpec
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.types.model import TargetModule

if TYPE_CHECKING:
    import torch


class BaseWeights(Protocol):
    """Weights of the base that some parts are computed from; loader threads read them.

    Tensors are views in the dtype and on the device of the base.
    """

    def weight(self, layer: int, projection: str) -> torch.Tensor:
        """Return the weight [out, in] of a projection."""
        ...

    def bias(self, layer: int, projection: str) -> torch.Tensor | None: ...

    def norm(self, layer: int, name: str) -> torch.Tensor:
        """Return the weight of ATTENTION_NORM or MLP_NORM of a layer, or of FINAL_NORM at
        MODEL_LEVEL.

        It is the factor that the norm multiplies by (models that store weight - 1: plus one).
        """
        ...

    @property
    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden], without the scale that some models multiply embeddings by."""
        ...

    @property
    def head(self) -> torch.Tensor:
        """[vocabulary, hidden]; the embedding if the model ties them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LoraModule:
    """The low rank of one linear layer: it adds scale * (b @ a) to the weight."""

    target: TargetModule
    rank: int
    alpha: float
    scale: float
    a: torch.Tensor
    """[rank, in], in the dtype of the file."""
    b: torch.Tensor
    """[out, rank]; the scale is not applied. In the dtype of the file, or float32 if computed."""


@dataclass(frozen=True, slots=True, eq=False)
class ExtraTensor:
    """The values of a extra, as the kernels use them."""

    key: ExtraKey
    values: torch.Tensor
    """[rows, width] on the CPU, of any float dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterParts:
    """All parts of an adapter; their shapes are those that the inspection found."""

    modules: tuple[LoraModule, ...]
    """The low rank of each adapted linear layer, in the order of the base."""
    extras: tuple[ExtraTensor, ...] = ()


class AdapterContents(Protocol):
    """What the config and the header of an adapter say that it consists of; no tensor is read."""

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        """The rank at each (layer, projection) with low rank."""
        ...

    @property
    def extras(self) -> tuple[ExtraSpec, ...]: ...

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        """The tensors of the file that the parts are made of."""
        ...

    @property
    def unused(self) -> tuple[str, ...]:
        """The tensors of the file that do not change the result."""
        ...

    @property
    def only_alone(self) -> str:
        """Why the adapter cannot be part of a sum or have a weight; empty if it can."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def are_views(self) -> bool:
        """Whether the parts are views of the file's tensors, which need not be read before."""
        ...

    def make_parts(
        self, tensors: Mapping[str, torch.Tensor], base_weights: BaseWeights | None
    ) -> AdapterParts:
        """Make the parts from the tensors of the file.

        Raises AdapterRefused. `base_weights` may be None where the values do not matter; parts that
        are computed from the base are then absent from `extras`.
        """
        ...


class AdapterPlan(Protocol):
    """What the config of an adapter asks of this base, before the weights file is opened."""

    def match(self, entries: Sequence[TensorEntry], *, max_rank: int | None) -> AdapterContents:
        """Check the names and shapes of the file's tensors; raise AdapterRefused."""
        ...
