"""16 rows of y in the order in which lanes feed a matrix unit.

Every warp has 8 * J outputs of its own. What a lane reads and writes of y, J outputs side by side,
is what it holds of the sum, and of B and h it reads what it multiplies: nothing goes through shared
memory, and no warp waits for another. Which of its outputs is which of a matrix product's is a
matter of names: B's are named as y's are. The same holds for ranks, B's and h's.

The axes of y: lanes (4), lanes (8), warps, two pieces of outputs, two of rows, outputs side by
side; or, where the compiler deals them out from the other end, all but the last in reverse. Where J
outputs are the 16 bytes that a lane reads at once, lanes and warps get what they multiply.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import load_sum
from loramux.kernels.gpu.lora_augmented.rank_block import load_group
from loramux.kernels.gpu.pdl import LANES_FIRST, axis


@triton.jit
def order_rows():
    """Where y has them: one number for each of two kinds of axes"""
    return axis(8, 1, 6, LANES_FIRST) + 8 * axis(2, 4, 6, LANES_FIRST)


@triton.jit
def order_columns(WARPS: tl.constexpr, J: tl.constexpr):
    """Where y has them: along the other four"""
    piece = axis(2, 3, 6, LANES_FIRST) * (4 * J) + axis(4, 0, 6, LANES_FIRST) * J
    return axis(WARPS, 2, 6, LANES_FIRST) * (8 * J) + piece + axis(J, 5, 6, LANES_FIRST)


@triton.jit
def load_ordered_b(pool, group, first, count, width, WARPS: tl.constexpr, J: tl.constexpr):
    """As tail_group's load_b, as the second operand of each warp: [WARPS, 16, 8 * J]

    The axes: lanes (4), lanes (8), warps, two of two ranks, two pairs of ranks, outputs
    """
    line = axis(8, 1, 6, LANES_FIRST)
    rank = axis(4, 0, 6, LANES_FIRST) * 4 + axis(2, 4, 6, LANES_FIRST) * 2
    rank += axis(2, 3, 6, LANES_FIRST)
    column = line % 2 * (4 * J) + line // 2 * J + axis(J, 5, 6, LANES_FIRST)
    column += axis(WARPS, 2, 6, LANES_FIRST) * (8 * J)
    mask = (rank < group[1]) & (column < count)
    b = tl.load(pool + group[0] + rank * width + first + column, mask=mask, other=0.0)
    b = tl.permute(b, (2, 4, 0, 3, 5, 1)) if LANES_FIRST else tl.permute(b, (2, 0, 4, 1, 5, 3))
    return tl.reshape(b, (WARPS, 16, 8 * J))


@triton.jit
def load_ordered_h(  # noqa: PLR0913
    tail, h_step, tail_stride, group, num_rows, dtype, WARPS: tl.constexpr,
    part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """As tail_group's load_h of a row, for all rows, as each warp's first operand: [WARPS, 16, 16]

    Rounded as it is multiplied. The axes: lanes (4), lanes (8), warps, two of rows, four ranks
    """
    # All warps read the same.
    row = axis(8, 1, 5, LANES_FIRST) + 8 * axis(2, 3, 5, LANES_FIRST)
    row += 0 * axis(WARPS, 2, 5, LANES_FIRST)
    rank = axis(4, 0, 5, LANES_FIRST) * 4 + axis(4, 4, 5, LANES_FIRST)
    # A row without an adapter has no block: whatever there is may be no number.
    num_rows = tl.where(group[1] > 0, num_rows, 0)
    at = tail + group[2] * h_step + row * tail_stride + rank
    h = load_sum(at, row < num_rows, part_step, dtype, PARTS)
    h = (h.to(tl.float32) * group[3]).to(dtype)
    if LANES_FIRST:
        h = tl.permute(tl.reshape(h, (4, 8, WARPS, 2, 2, 2)), (2, 3, 1, 4, 0, 5))
    else:
        h = tl.permute(tl.reshape(h, (2, WARPS, 8, 4, 2, 2)), (1, 0, 2, 4, 3, 5))
    return tl.reshape(h, (WARPS, 16, 16))


@triton.jit
def add_ordered(total, h, b, WARPS: tl.constexpr, J: tl.constexpr):
    """total + h @ b, as y is, float32"""
    if LANES_FIRST:
        total = tl.permute(total, (2, 4, 1, 5, 0, 3))
    else:
        total = tl.permute(total, (2, 0, 3, 5, 4, 1))
    sums = tl.dot(h, b, tl.reshape(total, (WARPS, 16, 8 * J)), input_precision="ieee")
    sums = tl.reshape(sums, (WARPS, 2, 8, J, 4, 2))
    if LANES_FIRST:
        sums = tl.permute(sums, (4, 2, 0, 5, 1, 3))
    else:
        sums = tl.permute(sums, (1, 5, 0, 2, 4, 3))
    return sums


@triton.jit
def sum_columns(x):
    """The sum of every row of what is as y is, one number for all of its columns."""
    x = tl.sum(tl.sum(x, 5, keep_dims=True), 2, keep_dims=True)
    if LANES_FIRST:
        x = tl.sum(tl.sum(x, 3, keep_dims=True), 0, keep_dims=True)
    else:
        x = tl.sum(tl.sum(x, 1, keep_dims=True), 4, keep_dims=True)
    return x


@triton.jit
def add_ordered_followers(  # noqa: PLR0913
    total, units, pool, records, tail, tail_stride, h_step, num_rows, first, count, width,
    WARPS: tl.constexpr, J: tl.constexpr, part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """As tail_group's add_followers, of all rows."""
    for unit in tl.range(units[0], units[1], num_stages=1):
        group = load_group(records + unit * 64)
        b = load_ordered_b(pool, group, first, count, width, WARPS, J)
        h = load_ordered_h(
            tail, h_step, tail_stride, group, num_rows, b.dtype, WARPS, part_step, PARTS
        )
        total = add_ordered(total, h, b, WARPS, J)
    return total
