"""The interface behind every linear layer, whatever format its weight is stored in."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# With AMX, oneDNN multiplies 16-bit numbers in tiles this deep. The last tile of an inner size that
# is no multiple reads past the row, and what lies there, times 0, is NaN if the next row has NaN.
TILE_DEPTH = 32


class DenseWeight(NamedTuple):
    """A weight [out, in] in floating point, and its bias [out]."""

    weight: Tensor
    bias: Tensor | None


class LinearMethod(Protocol):
    """Stores the weight of a linear layer and computes y = x @ weight.T + bias.

    Kernels and merging read the weight through `dense` alone, so that a format without a
    floating-point copy (FP8, int4) needs no more than `__call__`.
    """

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [tokens, out] from x [tokens, in]."""
        ...

    @property
    def dense(self) -> DenseWeight | None:
        """The weight and bias; None if the weight is not stored in floating point."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes, packed copies included."""
        ...

    def with_weight(self, weight: Tensor) -> LinearMethod:
        """Make a linear of the same format and bias over another dense weight [out, in]."""
        ...


def dense_of(linear: LinearMethod) -> DenseWeight:
    """The dense weight of a linear; raise TypeError for a wrapped or quantised one."""
    dense: DenseWeight | None = getattr(linear, "dense", None)
    if dense is None:
        raise TypeError(f"{type(linear).__name__} has no dense weight")
    return dense


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
