"""The interface behind every linear layer, whatever format its weight is stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.types.model import Projection

DENSE = "dense"
"""GEMM key of weights in floating point."""
ALL_ROWS = slice(None)
# With AMX, oneDNN multiplies 16-bit numbers in tiles this deep. The last tile of an inner size that
# is no multiple reads past the row, and what lies there, times 0, is NaN if the next row has NaN.
TILE_DEPTH = 32


class DenseWeight(NamedTuple):
    """A weight [out, in] in floating point, and its bias [out]."""

    weight: Tensor
    bias: Tensor | None


class Slot(Protocol):
    """The destination of one tensor of a checkpoint."""

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy the tensor of this name; raise UnsupportedModel if it does not fit."""
        ...


class LinearMethod(Protocol):
    """Stores the weight of a linear layer and computes y = x @ weight.T + bias.

    Whatever else reads the weight (DoRA, merging, whole weights of adapters) asks for dequantised
    rows, and a GEMM kernel reads the formats that it knows by their key.
    """

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [tokens, out] from x [tokens, in]."""
        ...

    def slots(self, projection: Projection) -> Mapping[str, Slot]:
        """Return the destinations of a projection's tensors by parameter name: weight, bias, ..."""
        ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def gemm_key(self) -> str:
        """The format of the weight; DENSE: `dequantised_rows` is the stored weight itself."""
        ...

    def dequantised_rows(self, rows: slice = ALL_ROWS) -> Tensor:
        """Return the rows [rows, in] of the weight in floating point."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes, packed copies included."""
        ...

    @property
    def merged_bytes(self) -> int:
        """Memory of a linear that `with_weight` returns."""
        ...

    def with_weight(self, weight: Tensor) -> LinearMethod:
        """Make a linear with the same bias over another weight [out, in] in floating point."""
        ...


@runtime_checkable
class SplitsInputs(Protocol):
    """A linear that may leave the sum over splits of its inputs to the op that follows."""

    def partial_sums(self, x: Tensor) -> Tensor:
        """Compute y [tokens, out], or float32 [splits, tokens, out] to be summed."""
        ...


@runtime_checkable
class DependsOnRows(Protocol):
    """A linear that computes another function for each row of a step, such as its adapters."""

    def at_rows(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the linear of an input that consists of these rows of the step, ascending."""
        ...


def at_rows(linear: LinearMethod, rows: Tensor) -> Callable[[Tensor], Tensor]:
    return linear.at_rows(rows) if isinstance(linear, DependsOnRows) else linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias in whole tiles of a CPU."""
    padding = tile_padding(weight)
    if padding:
        x, weight = F.pad(x, (0, padding)), F.pad(weight, (0, padding))
    return F.linear(x, weight, bias)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight, where a row of x with NaN or infinity changes no other. x [..., rows, in]

    As such rows are rare, they are taken out; padding would copy the weights of adapters in each
    step.
    """
    depth = x.shape[-1]
    if not (x.is_cpu and x.itemsize == 2 and depth % TILE_DEPTH):
        return torch.matmul(x, weight)
    is_sound = x.isfinite().all(dim=-1, keepdim=True)
    if bool(is_sound.all()):
        return torch.matmul(x, weight)
    return torch.matmul(x.where(is_sound, 0), weight).masked_fill_(~is_sound, torch.nan)


def tile_padding(weight: Tensor) -> int:
    """Return how many columns of zeros weight [out, in] and its input need for whole tiles."""
    return -weight.shape[1] % TILE_DEPTH if weight.is_cpu and weight.itemsize == 2 else 0
