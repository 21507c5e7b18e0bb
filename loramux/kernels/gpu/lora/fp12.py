"""Unpacks fp12 weights (see adapters.packed.fp12) into MMA operands.

The words are stored so that two instructions per two weights give each thread of a warp its MMA
fragment: nothing goes through shared memory. For that a warp must load whole rows of 128 words, so
the last axis is the 128 words of a warp; the others are warps, octets of ranks, blocks of words.

Unpacking reads two adjacent words of a thread at once (pack=2): a thread must own at least two
adjacent words of the last axis, as the coalesced 16-byte loads of load_planes give it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The four exponent bits are unpacked as those of bfloat16: 2^-126 .. 2^-111 stand for 2^-14 .. 2^1.
FP12_SCALE: tl.constexpr = tl.constexpr(2.0**112)

# $8 .. $13: two adjacent words of each plane; $0 .. $7: eight pairs of bfloat16.
_PAIRS: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, c, d;
and.b32 a, $12, 0x87878787;
shf.l.wrap.b32 b, $12, $12, 4;
and.b32 b, b, 0x87878787;
and.b32 c, $13, 0x87878787;
shf.l.wrap.b32 d, $13, $13, 4;
and.b32 d, d, 0x87878787;
prmt.b32 $0, $8, a, 0x5140;
prmt.b32 $1, $8, a, 0x7362;
prmt.b32 $2, $9, b, 0x5140;
prmt.b32 $3, $9, b, 0x7362;
prmt.b32 $4, $10, c, 0x5140;
prmt.b32 $5, $10, c, 0x7362;
prmt.b32 $6, $11, d, 0x5140;
prmt.b32 $7, $11, d, 0x7362;
}
""")


@triton.jit
def load_planes(at, num_columns, mask, EVICTION: tl.constexpr):
    """Load the words of all three planes; `at` points into the first."""
    first = tl.load(at, mask=mask, other=0, eviction_policy=EVICTION)
    second = tl.load(at + num_columns, mask=mask, other=0, eviction_policy=EVICTION)
    third = tl.load(at + 2 * num_columns, mask=mask, other=0, eviction_policy=EVICTION)
    return first, second, third


@triton.jit
def unpack_fp12(
    planes, WARPS: tl.constexpr, OCTETS: tl.constexpr, BLOCKS: tl.constexpr, COMPILED: tl.constexpr
):
    """Unpacks the planes to [WARPS, OCTETS * 8, BLOCKS * 128] / FP12_SCALE.

    The result is bfloat16, or float32 in the interpreter, whose bfloat16 dot rounds differently.
    """
    if COMPILED:
        pairs = tl.inline_asm_elementwise(
            _PAIRS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r",
            [planes[0], planes[1], planes[2]],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),  # fmt: skip
            is_pure=True,
            pack=2,
        )
    else:
        pairs = _pairs(planes)
    even = tl.join(tl.join(pairs[0], pairs[4]), tl.join(pairs[2], pairs[6]))
    odd = tl.join(tl.join(pairs[1], pairs[5]), tl.join(pairs[3], pairs[7]))
    weights = tl.join(even, odd)
    # warp, octet, block, row, thread, word pair, word of two, three bits of a pair's number
    weights = tl.reshape(weights, (WARPS, OCTETS, BLOCKS, 8, 4, 2, 2, 2, 2, 2))
    weights = tl.permute(weights, (0, 1, 3, 2, 5, 7, 8, 4, 9, 6))
    return tl.reshape(weights, (WARPS, OCTETS * 8, BLOCKS * 128))


@triton.jit
def _pairs(planes):
    """Compute what the instructions above compute, one number at a time."""
    mask: tl.constexpr = 0x87878787 - (1 << 32)
    axes = planes[0].shape
    shape: tl.constexpr = (axes[0], axes[1], axes[2], 64, 2)
    low0, low1 = tl.split(tl.reshape(planes[0], shape))
    low2, low3 = tl.split(tl.reshape(planes[1], shape))
    first, second = tl.split(tl.reshape(planes[2], shape))
    return (
        _pair(low0, first & mask, 0),
        _pair(low0, first & mask, 2),
        _pair(low1, _rotate(first) & mask, 0),
        _pair(low1, _rotate(first) & mask, 2),
        _pair(low2, second & mask, 0),
        _pair(low2, second & mask, 2),
        _pair(low3, _rotate(second) & mask, 0),
        _pair(low3, _rotate(second) & mask, 2),
    )


@triton.jit
def _rotate(word):
    return (word << 4) | ((word >> 28) & 15)


@triton.jit
def _pair(low, high, BYTE: tl.constexpr):
    """Bytes BYTE and BYTE + 1 as adjacent float32 numbers: [..., 64] to [..., 128]."""
    first = ((high >> (8 * BYTE)) & 255) << 24 | ((low >> (8 * BYTE)) & 255) << 16
    second = ((high >> (8 * BYTE + 8)) & 255) << 24 | ((low >> (8 * BYTE + 8)) & 255) << 16
    both = tl.join(first, second).to(tl.float32, bitcast=True)
    return tl.reshape(both, (low.shape[0], low.shape[1], low.shape[2], 128))
