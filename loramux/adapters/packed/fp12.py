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

import torch
from torch import Tensor

from loramux.adapters.packed.paged import BLOCK_COLUMNS, OCTET

LARGEST_EXPONENT = 60
"""Limit of a row's scale, so that the inverse scale in B stays in the range of bfloat16."""

# Exponents 0 .. 15 stand for 112 .. 127 of bfloat16; 0 is for subnormals.
_LOWEST = 112
_MANTISSA_BITS = 7
_STEPS_PER_ONE = 2.0**21
_EACH_HIGH = 0x0FFFFFFF
# The bits of 2 in bfloat16.
_TOO_LARGE = 0x4000


def row_exponents(rows: Tensor) -> Tensor:
    """int32 [rows, 1]: exponents such that rows / 2^exponent have their maximum in [1, 2)."""
    largest = rows.float().abs().amax(dim=1, keepdim=True)
    _, exponents = torch.frexp(largest)
    exponents = torch.where(largest > 0, exponents - 1, 0)
    return exponents.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)


def fits_fp12(rows: Tensor) -> bool:
    """Whether all values are below 2, the range of fp12."""
    return bool((rows.to(torch.bfloat16).view(torch.int16) & 0x7FFF).max() < _TOO_LARGE)


def pack_fp12(rows: Tensor) -> Tensor:
    """Packs rows [n, width] below 2 to int32 [octets, 3, width]; missing rows are zero."""
    num_rows, width = rows.shape
    num_octets = -(-num_rows // OCTET)
    codes = torch.zeros(num_octets * OCTET, width, dtype=torch.int16)
    codes[:num_rows] = _codes(rows)
    low = codes.bitwise_and(0xFF).to(torch.uint8).view(torch.int32)
    high = ((codes >> 8) & 0x87).to(torch.uint8).view(torch.int32)
    # octet, row, block, word pair, plane, word, thread
    shape = (num_octets, OCTET, width // BLOCK_COLUMNS, 2, 2, 2, 4)
    # octet, plane, block, row, thread, word pair, word
    low_words = low.view(shape).permute(0, 4, 2, 1, 6, 3, 5)
    # octet, block, row, thread, word pair, plane
    first, second = high.view(shape).permute(0, 2, 1, 6, 3, 4, 5).unbind(-1)
    both = first | ((second >> 4) & _EACH_HIGH) | (second << 28)
    planes = (low_words.reshape(num_octets, 2, width), both.reshape(num_octets, 1, width))
    return torch.cat(planes, dim=1)


def _codes(rows: Tensor) -> Tensor:
    """Encodes to int16: the sign at bit 15, exponent and mantissa in bits 10 .. 0."""
    bits = rows.to(torch.bfloat16).view(torch.int16)
    magnitude = bits & 0x7FFF
    normal = magnitude - (_LOWEST << _MANTISSA_BITS)
    # Wraps around for larger values, for which it is not used.
    small = (magnitude.view(torch.bfloat16).float() * _STEPS_PER_ONE).round_().to(torch.int16)
    codes = torch.where(normal < 1 << _MANTISSA_BITS, small, normal)
    return codes.bitwise_or_(bits & -0x8000)
