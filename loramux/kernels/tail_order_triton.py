"""16 rows of y in the order in which lanes feed a matrix unit.

Every warp has 8 * J outputs of its own. What a lane reads and writes of y, J outputs side by side,
is what it holds of the sum, and of B and h it reads what it multiplies: nothing goes through shared
memory, and no warp waits for another. Which of its outputs is which of a matrix product's is a
matter of names: B's are named as y's are. The same holds for ranks, B's and h's.

The axes of y: lanes (4), lanes (8), warps, two pieces of outputs, two of rows, outputs side by
side. The compiler deals out the last axis, then the others from the first on: where J outputs are
the 16 bytes that a lane reads at once, lanes and warps get what they multiply.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.fused_triton import load_sum
from loramux.kernels.tail_group_triton import load_group


@triton.jit
def order_rows():
    """Where y has them: [1, 8, 1, 1, 2, 1]"""
    lane = tl.arange(0, 8)[None, :, None, None, None, None]
    return lane + 8 * tl.arange(0, 2)[None, None, None, None, :, None]


@triton.jit
def order_columns(WARPS: tl.constexpr, J: tl.constexpr):
    """Where y has them: [4, 1, WARPS, 2, 1, J]"""
    lane = tl.arange(0, 4)[:, None, None, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None, None]
    piece = tl.arange(0, 2)[None, None, None, :, None, None]
    inner = tl.arange(0, J)[None, None, None, None, None, :]
    return warp * (8 * J) + piece * (4 * J) + lane * J + inner


@triton.jit
def load_ordered_b(pool, group, first, count, width, WARPS: tl.constexpr, J: tl.constexpr):
    """As tail_group's load_b, as the second operand of each warp: [WARPS, 16, 8 * J]"""
    lane = tl.arange(0, 4)[:, None, None, None, None, None]
    line = tl.arange(0, 8)[None, :, None, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None, None]
    low = tl.arange(0, 2)[None, None, None, :, None, None]
    high = tl.arange(0, 2)[None, None, None, None, :, None]
    inner = tl.arange(0, J)[None, None, None, None, None, :]
    rank = lane * 4 + high * 2 + low
    column = warp * (8 * J) + line % 2 * (4 * J) + line // 2 * J + inner
    mask = (rank < group[1]) & (column < count)
    b = tl.load(pool + group[0] + rank * width + first + column, mask=mask, other=0.0)
    return tl.reshape(tl.permute(b, (2, 4, 0, 3, 5, 1)), (WARPS, 16, 8 * J))


@triton.jit
def load_ordered_h(  # noqa: PLR0913
    tail, h_step, tail_stride, group, num_rows, dtype, WARPS: tl.constexpr,
    part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """As tail_group's load_h of a row, for all rows, as each warp's first operand: [WARPS, 16, 16]

    Rounded as it is multiplied.
    """
    lane = tl.arange(0, 4)[:, None, None, None, None]
    line = tl.arange(0, 8)[None, :, None, None, None]
    # All warps read the same.
    warp = tl.arange(0, WARPS)[None, None, :, None, None]
    row = line + 8 * tl.arange(0, 2)[None, None, None, :, None] + 0 * warp
    rank = lane * 4 + tl.arange(0, 4)[None, None, None, None, :]
    # A row without an adapter has no block: whatever there is may be no number.
    num_rows = tl.where(group[1] > 0, num_rows, 0)
    at = tail + group[2] * h_step + row * tail_stride + rank
    h = load_sum(at, row < num_rows, part_step, dtype, PARTS)
    h = (h.to(tl.float32) * group[3]).to(dtype)
    h = tl.permute(tl.reshape(h, (4, 8, WARPS, 2, 2, 2)), (2, 3, 1, 4, 0, 5))
    return tl.reshape(h, (WARPS, 16, 16))


@triton.jit
def add_ordered(total, h, b, WARPS: tl.constexpr, J: tl.constexpr):
    """total + h @ b, as y is: [4, 8, WARPS, 2, 2, J] float32"""
    sums = tl.reshape(tl.permute(total, (2, 4, 1, 5, 0, 3)), (WARPS, 16, 8 * J))
    sums = tl.dot(h, b, sums, input_precision="ieee")
    return tl.permute(tl.reshape(sums, (WARPS, 2, 8, J, 4, 2)), (4, 2, 0, 5, 1, 3))


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
