"""What an adapter folder consists of once it is read: low-rank modules and other parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loramux.adapters.packed.extras import ExtraKey

if TYPE_CHECKING:
    import torch

    from loramux.adapters.peft.reader import LoraModule


class BaseWeights(Protocol):
    """Weights of the base that some parts are computed from; loader threads read them.

    Tensors are views in the dtype and on the device of the base.
    """

    def weight(self, layer: int, projection: str) -> torch.Tensor:
        """The weight [out, in] of a projection."""
        ...

    def bias(self, layer: int, projection: str) -> torch.Tensor | None: ...

    def norm(self, layer: int, name: str) -> torch.Tensor:
        """The weight of ATTENTION_NORM or MLP_NORM of a layer, or of FINAL_NORM at MODEL_LEVEL.

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
class ExtraTensor:
    """The values of a part beside low rank, as the kernels use them."""

    key: ExtraKey
    values: torch.Tensor
    """[rows, width] on the CPU, of any float dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterParts:
    """All parts of an adapter; their shapes are those that the inspection found."""

    modules: tuple[LoraModule, ...]
    """The low rank of each adapted linear layer, in the order of the base."""
    extras: tuple[ExtraTensor, ...] = ()
