"""Weights as arrays of bits, for checks and packing.

It uses numpy on the calling thread: torch would start an OpenMP team for each loader thread, and
numpy releases the GIL in every pass over a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.errors import AdapterRefused

if TYPE_CHECKING:
    from loramux.adapters.peft.parts import ExtraTensor, LoraModule

Bits = NDArray[Any]
"""Unsigned integers of the size of the weights' dtype."""
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_FLOATS: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
_BFLOAT16_SHIFT = 16
# Added to the bits of a float32 before the shift, with the lowest kept bit: half to even.
_BELOW_HALF = np.uint32(0x7FFF)


@dataclass(frozen=True, slots=True)
class RankMaxima:
    """The largest absolute value of each rank in A and B; NaN or infinite if one value is."""

    a: Float64
    b: Float64


def rank_maxima(module: LoraModule) -> RankMaxima:
    return RankMaxima(
        row_maxima(bits_of(module.a), module.a.dtype),
        row_maxima(transposed_bits(module.b), module.b.dtype),
    )


def largest_of(part: ExtraTensor) -> float:
    """Return the largest absolute value of a extra.

    Raises AdapterRefused for values that are not finite.
    """
    bits = bits_of(part.values.contiguous())
    largest = float(row_maxima(bits.reshape(1, -1), part.values.dtype)[0])
    if not np.isfinite(largest):
        _, module, kind = part.key
        raise AdapterRefused(
            "not_finite",
            f"The {kind} of {module} has NaN or infinite values.",
            fix="The training diverged; give an earlier checkpoint.",
        )
    return largest


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return a view of the tensor's memory."""
    itemsize = tensor.dtype.itemsize
    array: Bits = tensor.view(_INTEGERS[itemsize]).numpy().view(_UNSIGNED[itemsize])
    return array


def transposed_bits(tensor: torch.Tensor) -> Bits:
    """Return the transposed matrix as a contiguous copy."""
    return np.ascontiguousarray(bits_of(tensor).T)


def magnitudes(bits: Bits) -> Bits:
    """Return the bits without the sign: they are ordered as absolute values, and NaN is last."""
    return cast(Bits, bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1))


def row_maxima(bits: Bits, dtype: torch.dtype) -> Float64:
    return maxima_of(magnitudes(bits).max(axis=1), dtype)


def maxima_of(largest: Bits, dtype: torch.dtype) -> Float64:
    """Return the values of maxima that were found as bits."""
    if dtype is torch.bfloat16:
        return float32_of(largest, dtype).astype(np.float64)
    return largest.view(_FLOATS[dtype]).astype(np.float64)


def float32_of(bits: Bits, dtype: torch.dtype) -> Float32:
    """Convert to float32; a float64 outside its range becomes infinite."""
    if dtype is torch.bfloat16:
        words = bits.astype(np.uint32)
        words <<= np.uint32(_BFLOAT16_SHIFT)
        return words.view(np.float32)
    with np.errstate(over="ignore"):
        return bits.view(_FLOATS[dtype]).astype(np.float32)


def stored_bits(values: Float32, dtype: torch.dtype) -> Bits:
    """Round to the nearest value of a serving dtype, and return its bits."""
    if dtype is torch.bfloat16:
        words = values.view(np.uint32)
        rounding = words >> np.uint32(_BFLOAT16_SHIFT)
        rounding &= np.uint32(1)
        rounding += _BELOW_HALF
        rounding += words
        # The upper half of each word; all platforms of torch are little-endian.
        return rounding.view(np.uint16)[..., 1::2]
    with np.errstate(over="ignore"):
        rounded = values.astype(_FLOATS[dtype], copy=False)
    return cast(Bits, rounded.view(_UNSIGNED[dtype.itemsize]))


def converted_bits(bits: Bits, source: torch.dtype, target: torch.dtype) -> Bits:
    return bits if source is target else stored_bits(float32_of(bits, source), target)
