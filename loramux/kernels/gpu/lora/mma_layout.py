"""Tiles of 16 rows of y in the MMA fragment layout of mma.m16n8k16.

Every warp owns 8 * J outputs. A thread loads and stores J adjacent outputs of y, which are also its
accumulator fragment, and loads exactly the fragments of B and h that it multiplies: no data goes
through shared memory and no warp waits for another. Which output is which MMA column is a matter of
numbering, as long as B and y agree; the same holds for the ranks of B and h.

The axes of y are threads (4), threads (8), warps, two groups of outputs, two of rows, adjacent
outputs. Triton (3.6) assigns the last axis to a thread, then the axes from the first on to threads
and warps, so that with J outputs of 16 bytes every thread gets its fragment. With another
assignment the compiler inserts layout conversions: slower, but not wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import load_sum
from loramux.kernels.gpu.lora.work_item import RESOLVED_WORDS, load_block
from loramux.kernels.gpu.pdl import axis


@triton.jit
def fragment_rows():
    """Row numbers of y, along the axes of rows."""
    return axis(8, 1, 6) + 8 * axis(2, 4, 6)


@triton.jit
def fragment_columns(WARPS: tl.constexpr, J: tl.constexpr):
    """Column numbers of y, along the four other axes."""
    group = axis(2, 3, 6) * (4 * J) + axis(4, 0, 6) * J
    return axis(WARPS, 2, 6) * (8 * J) + group + axis(J, 5, 6)


@triton.jit
def load_b_fragments(pool, block, start, count, width, WARPS: tl.constexpr, J: tl.constexpr):
    """Columns start.. of a rank block's B as each warp's second operand: [WARPS, 16, 8 * J].

    `count` columns exist, of `width` in a row. The axes: threads (4), threads (8), warps, two of
    two ranks, two pairs of ranks, outputs
    """
    line = axis(8, 1, 6)
    rank = axis(4, 0, 6) * 4 + axis(2, 4, 6) * 2 + axis(2, 3, 6)
    column = line % 2 * (4 * J) + line // 2 * J + axis(J, 5, 6) + axis(WARPS, 2, 6) * (8 * J)
    mask = (rank < block[1]) & (column < count)
    b = tl.load(pool + block[0] + rank * width + start + column, mask=mask, other=0.0)
    return tl.reshape(tl.permute(b, (2, 4, 0, 3, 5, 1)), (WARPS, 16, 8 * J))


@triton.jit
def load_h_fragments(  # noqa: PLR0913
    h_ptr, h_step, h_stride, block, rows, dtype, WARPS: tl.constexpr,
    split_stride=0, SPLITS: tl.constexpr = 1,
):  # fmt: skip
    """weight * h of a rank block for 16 rows as each warp's first operand: [WARPS, 16, 16].

    h_ptr points to the shrink's outputs of the first row and slice; h_step is the distance of two
    rank blocks, h_stride of two rows, split_stride of two split-K partial sums. Only `rows` rows
    exist. The axes: threads (4), threads (8), warps, two of rows, four ranks
    """
    # All warps read the same h.
    row = axis(8, 1, 5) + 8 * axis(2, 3, 5) + 0 * axis(WARPS, 2, 5)
    rank = axis(4, 0, 5) * 4 + axis(4, 4, 5)
    # Rows without an adapter have no rank block: what is stored there may be NaN.
    rows = tl.where(block[1] > 0, rows, 0)
    at = h_ptr + block[2] * h_step + row * h_stride + rank
    h = load_sum(at, row < rows, split_stride, dtype, SPLITS)
    h = (h.to(tl.float32) * block[3]).to(dtype)
    h = tl.permute(tl.reshape(h, (4, 8, WARPS, 2, 2, 2)), (2, 3, 1, 4, 0, 5))
    return tl.reshape(h, (WARPS, 16, 16))


@triton.jit
def mma_add(total, h, b, WARPS: tl.constexpr, J: tl.constexpr):
    """total + h @ b on tensor cores, float32 in the layout of y."""
    total = tl.reshape(tl.permute(total, (2, 4, 1, 5, 0, 3)), (WARPS, 16, 8 * J))
    sums = tl.dot(h, b, total, input_precision="ieee")
    return tl.permute(tl.reshape(sums, (WARPS, 2, 8, J, 4, 2)), (4, 2, 0, 5, 1, 3))


@triton.jit
def sum_fragment_columns(x):
    """Return the sum of each row of a tensor in the layout of y, the other axes reduced to 1."""
    x = tl.sum(tl.sum(x, 5, keep_dims=True), 2, keep_dims=True)
    return tl.sum(tl.sum(x, 3, keep_dims=True), 0, keep_dims=True)


@triton.jit
def mma_add_next(  # noqa: PLR0913
    total, next_range, pool, items, h_ptr, h_stride, h_step, rows, start, count, width,
    WARPS: tl.constexpr, J: tl.constexpr, split_stride=0, SPLITS: tl.constexpr = 1,
):  # fmt: skip
    """total plus what the next rank blocks of the same rows add; items, h_ptr: at the slice."""
    for index in tl.range(next_range[0], next_range[1], num_stages=1):
        block = load_block(items + index * RESOLVED_WORDS)
        b = load_b_fragments(pool, block, start, count, width, WARPS, J)
        h = load_h_fragments(
            h_ptr, h_step, h_stride, block, rows, b.dtype, WARPS, split_stride, SPLITS
        )
        total = mma_add(total, h, b, WARPS, J)
    return total
