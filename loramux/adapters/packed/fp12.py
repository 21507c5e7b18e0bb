"""fp12: bfloat16 weights in 12 bits, a quarter less memory traffic for A.

The sign, the four low exponent bits and the mantissa of a bfloat16 are kept. Rows are first scaled
by a power of two, so that their largest value is in [1, 2); the inverse scale goes into B. Values
of at least 2^-14 are exact; smaller ones are rounded to multiples of 2^-21 like subnormals, an
error below that of a float32 sum.

Eight rows (an octet) of 128 columns (a block) are three planes of 128 words, in the MMA fragment
layout: thread 4 g + t of a warp has four words of row g in each plane. The seven bits of a column's
number are, from the highest: word pair, plane, word, thread t (2), byte (2). The first two planes
hold the low bytes; a word of the third holds the sign and the three bits above the low byte of
eight values, four at bits 7, 2, 1, 0 of its bytes and four at those of its rotation by 4.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loramux.adapters.packed.paged import BLOCK_COLUMNS, OCTET, WORDS_PER_COLUMN
from loramux.adapters.values import bits_of, magnitudes

LARGEST_EXPONENT = 60
"""Limit of a row's scale, so that the inverse scale in B stays in the range of bfloat16."""
TOO_LARGE = 2.0 ** (LARGEST_EXPONENT + 1)
"""Rows with a larger value do not fit, even after they are scaled."""

_BIAS = 127
# Exponents 0 .. 15 stand for 112 .. 127 of bfloat16; 0 is for subnormals.
_LOWEST = 112
_MANTISSA_BITS = 7
_FIRST_NORMAL = 1 << _MANTISSA_BITS
_STEPS_PER_ONE = 2.0**21
_HIGH_BITS = np.uint8(0x07)
_SIGN = np.uint8(0x80)
_EACH_HIGH = np.uint32(0x0FFFFFFF)

Words = NDArray[np.uint32]


def row_exponents(largest: NDArray[np.uint16]) -> NDArray[np.int16]:
    """Return exponents such that rows / 2^exponent have their maximum in [1, 2).

    `largest`: the bits of the largest magnitude of each row, in bfloat16.
    """
    exponents = (largest >> _MANTISSA_BITS).astype(np.int16) - np.int16(_BIAS)
    exponents = exponents.clip(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return np.where(largest > 0, exponents, np.int16(0))


def pack_fp12(rows: Tensor) -> Tensor:
    """Packs bfloat16 rows [n, width] below 2 to int32 [octets, 3, width]; missing rows are zero."""
    bits = bits_of(rows.contiguous())
    num_octets = -(-len(bits) // OCTET)
    words = np.empty((num_octets, WORDS_PER_COLUMN, bits.shape[1]), dtype=np.uint32)
    pack_rows(bits, magnitudes(bits), np.zeros(len(bits), dtype=np.int16), words)
    return torch.from_numpy(words.view(np.int32))


def pack_rows(
    bits: NDArray[np.uint16],
    absolute: NDArray[np.uint16],
    exponents: NDArray[np.int16],
    out: Words,
) -> None:
    """Packs bfloat16 rows / 2^exponent, which are below 2, to out [octets, 3, width].

    `absolute`: the bits without the sign. Missing rows are zero.
    """
    num_rows, width = bits.shape
    codes = _codes(absolute, exponents)
    low, high = codes.astype(np.uint8), (codes >> 8).astype(np.uint8)
    high &= _HIGH_BITS
    # The upper byte of each little-endian value.
    high |= bits.view(np.uint8)[:, 1::2] & _SIGN
    for octet, words in enumerate(out):
        rows = slice(octet * OCTET, min(num_rows, (octet + 1) * OCTET))
        _write_octet(_whole(low[rows], width), _whole(high[rows], width), words)


def _codes(absolute: NDArray[np.uint16], exponents: NDArray[np.int16]) -> NDArray[np.int16]:
    """Return exponent and mantissa of each value in bits 10 .. 0."""
    lowest = (exponents[:, None] + np.int16(_LOWEST)) << np.int16(_MANTISSA_BITS)
    codes = absolute.view(np.int16) - lowest
    small = np.flatnonzero(codes < _FIRST_NORMAL)
    if len(small):
        words = absolute.reshape(-1)[small].astype(np.uint32) << np.uint32(16)
        scale = np.ldexp(np.float32(_STEPS_PER_ONE), -exponents[small // absolute.shape[1]])
        # Multiples of a power of two: rint rounds half to even, as subnormals are rounded.
        codes.reshape(-1)[small] = np.rint(words.view(np.float32) * scale).astype(np.int16)
    return codes


def _whole(rows: NDArray[np.uint8], width: int) -> Words:
    """Return the bytes of an octet as words [8 * width / 4]."""
    if len(rows) < OCTET:
        rows = np.concatenate([rows, np.zeros((OCTET - len(rows), width), dtype=np.uint8)])
    return rows.reshape(-1).view(np.uint32)


def _write_octet(low: Words, high: Words, out: Words) -> None:
    """Write the three planes [3, width] of an octet."""
    width = out.shape[1]
    low_order, high_order = _orders(width)
    np.take(low, low_order, out=out[:2].reshape(-1), mode="clip")
    first, second = np.take(high, high_order, mode="clip")
    both = out[2]
    np.right_shift(second, np.uint32(4), out=both)
    both &= _EACH_HIGH
    both |= first
    second <<= np.uint32(28)
    both |= second


@cache
def _orders(width: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return which word of an octet's rows goes to each place of the planes.

    The first array is for the low planes, the second [2, width] for the two words of each word of
    the high plane.
    """
    # row, block, word pair, plane, word, thread
    words = np.arange(OCTET * width // 4).reshape(OCTET, width // BLOCK_COLUMNS, 2, 2, 2, 4)
    # plane, block, row, thread, word pair, word
    low = words.transpose(3, 1, 0, 5, 2, 4).reshape(-1)
    # word, block, row, thread, word pair, plane
    high = words.transpose(4, 1, 0, 5, 2, 3).reshape(2, -1)
    return low, high
