"""Codes of a few bits in packed words, and how scales spread over a weight."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32
EXPONENT_BIAS = 127
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
E8M0_DTYPES = (torch.uint8, E8M0)
# Values of E2M1 by code: sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, n] to codes [rows, n * 32 // bits], uint8, lowest bits first.

    A code may begin in one word and end in the next: 3, 5, 6 and 7 bits are a stream of bits.
    """
    if WORD_BITS % bits == 0:
        return unpack_bytes(words.contiguous().view(torch.uint8), bits)
    num_groups = -(-words.shape[1] // bits)
    padded = torch.nn.functional.pad(words, (0, num_groups * bits - words.shape[1]))
    group = padded.view(len(words), num_groups, bits).to(torch.int64) & (2**WORD_BITS - 1)
    codes = torch.empty(len(words), num_groups, WORD_BITS, dtype=torch.uint8, device=words.device)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        value = group[..., word] >> shift
        if shift + bits > WORD_BITS:
            value = value | group[..., word + 1] << (WORD_BITS - shift)
        codes[..., index] = (value & (2**bits - 1)).to(torch.uint8)
    return codes.flatten(1)[:, : words.shape[1] * WORD_BITS // bits]


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """Unpack uint8 [rows, n] to codes [rows, n * 8 // bits], lowest bits first."""
    if bits == 8:
        return packed
    shifts = range(0, 8, bits)
    mask = 2**bits - 1
    return torch.stack([packed >> shift & mask for shift in shifts], dim=-1).flatten(1)


def grouped(codes: Tensor, scale: Tensor, zero: Tensor | float = 0.0) -> Tensor:
    """Compute (codes - zero) * scale in float32 for codes [out, in] and scale [out, groups].

    zero: a number, or [out, groups]
    """
    out, inputs = codes.shape
    values = codes.view(out, scale.shape[1], -1).float()
    values -= zero.float()[..., None] if isinstance(zero, Tensor) else zero
    values *= scale.float()[..., None]
    return values.view(out, inputs)


def by_index(codes: Tensor, scale: Tensor, zero: Tensor | float, group_of: Tensor) -> Tensor:
    """Compute (codes - zero) * scale, where group_of [in] is the group of each input."""
    values = codes.float()
    values -= zero.float()[:, group_of] if isinstance(zero, Tensor) else zero
    return values.mul_(scale.float()[:, group_of])


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (byte - 127) of E8M0 scales; 255 is NaN."""
    bytes_ = exponents.view(torch.uint8)
    values = torch.exp2(bytes_.float() - EXPONENT_BIAS)
    return torch.where(bytes_ == 255, torch.nan, values)


def spread_blocks(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Repeat scale [row blocks, column blocks] for every element; the last blocks may be cut."""
    rows, columns = shape
    tall = scale.repeat_interleave(block[0], 0)[:rows]
    return tall.repeat_interleave(block[1], 1)[:, :columns]


def e2m1_values(packed: Tensor) -> Tensor:
    """Decode FP4 codes [..., n] of two per byte, the low bits first, to float32 [..., 2n]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
    return table[pairs.flatten(-2).int()]
