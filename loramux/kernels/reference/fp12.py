"""Reference of unpacking fp12 weights: octets of rows, in blocks of 128 columns.

The words of an octet are three planes [blocks, 8 rows, 4 threads, 2 word pairs, 2 words]. The seven
bits of a column's number are, from the highest: word pair, plane, word, thread (2), byte (2).
Planes 0 and 1 hold low bytes; word i of plane 2 holds the high bits for plane i: for word 0 of it
at bits 7, 2, 1, 0 of each byte, for word 1 at those of the word's rotation by 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

OCTET = 8
BLOCK_COLUMNS = 128
WORDS_PER_COLUMN = 3

_HIGH_BITS = 0x87878787
_WORD = 0xFFFFFFFF


def unpack_fp12(words: Tensor) -> Tensor:
    """Unpacks int32 [octets, 3, width] to float32 [octets * 8, width]."""
    num_octets, _, width = words.shape
    # octet, plane, block, row, thread, word pair, word
    planes = (words.long() & _WORD).view(num_octets, 3, width // BLOCK_COLUMNS, OCTET, 4, 2, 2)
    high = planes[:, 2]
    rotated = ((high << 4) & _WORD) | (high >> 28)
    # octet, block, row, thread, word pair, plane, word
    high = torch.stack((high & _HIGH_BITS, rotated & _HIGH_BITS), dim=-1)
    low = planes[:, :2].permute(0, 2, 3, 4, 5, 1, 6)
    shifts = torch.arange(0, 32, 8, device=words.device)
    codes = ((high[..., None] >> shifts) & 0xFF) << 8 | ((low[..., None] >> shifts) & 0xFF)
    # octet, row, block, word pair, plane, word, thread, byte
    codes = codes.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(num_octets * OCTET, width)
    return _values(codes)


def read_fp12(pool: Tensor, start: int, num_rows: int, width: int) -> Tensor:
    """Unpacks rows from element `start` of a pool on: float32 [num_rows, width]."""
    num_octets = -(-num_rows // OCTET)
    num_elements = num_octets * WORDS_PER_COLUMN * 2 * width
    words = pool.view(-1)[start : start + num_elements].view(torch.int32)
    return unpack_fp12(words.view(num_octets, WORDS_PER_COLUMN, width))[:num_rows]


def _values(codes: Tensor) -> Tensor:
    """Decode the sign at bit 15, and exponent and mantissa in bits 10 .. 0."""
    magnitude = codes & 0x7FF
    exponent, mantissa = magnitude >> 7, magnitude & 127
    normal = torch.ldexp(1 + mantissa / 128, exponent - 15)
    values = torch.where(exponent > 0, normal, mantissa * 2.0**-21)
    return torch.where(codes >> 15 > 0, -values, values).float()
