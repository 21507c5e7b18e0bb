"""The interface behind every linear layer, whatever format its weight is stored in."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


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
