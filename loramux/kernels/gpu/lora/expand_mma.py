"""What a list's adapters add to a tile of 16 rows, by matrix units, in the order of their lanes."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.mma_layout import (
    add_ordered,
    load_ordered_b,
    order_columns,
    order_rows,
)
from loramux.kernels.gpu.lora_augmented.rank_block import load_group

TILE_ROWS = 16


@triton.jit
def tile_places(num_rows, first, width, WARPS: tl.constexpr, J: tl.constexpr):
    """Rows and columns of a tile as lanes have them, and which of both are there."""
    row = order_rows()
    column = order_columns(WARPS, J)
    return row, first + column, (row < num_rows) & (column < width - first)


@triton.jit
def _load_h(  # noqa: PLR0913
    partials, group, num_rows, dtype, WARPS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr, SMALL_SPLITS: tl.constexpr, SMALL_ROWS: tl.constexpr,
):  # fmt: skip
    """weight * h of all rows, as each warp's first operand: [WARPS, 16, 16]

    Read by all warps together, and handed to each through shared memory. Of a small tile a shrink
    has made SMALL_SPLITS parts.
    """
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    num_splits = tl.where(num_rows <= SMALL_ROWS, SMALL_SPLITS, SPLITS)
    row = tl.arange(0, 16)[:, None]
    rank = tl.arange(0, 16)[None, :]
    at = partials + group[2].to(tl.int64) * H_STRIDE + row * H_STRIDE + rank
    # A mask that is one for all ranks of a row: several are read at once. What no shrink has
    # written may be no number.
    live = tl.where(group[1] > 0, num_rows, 0)
    h = tl.load(at, mask=row < live, other=0.0)
    MOST: tl.constexpr = SPLITS if SPLITS > SMALL_SPLITS else SMALL_SPLITS
    for split in tl.static_range(1, MOST):
        mask = row < tl.where(split < num_splits, live, 0)
        h += tl.load(at + split * 16, mask=mask, other=0.0)
    h = (h * group[3]).to(dtype)
    # Ranks by the names that B has: four of a lane are two and two.
    h = tl.reshape(tl.permute(tl.reshape(h, (16, 4, 2, 2)), (0, 2, 1, 3)), (16, 16))
    return tl.broadcast_to(h[None, :, :], (WARPS, 16, 16))


@triton.jit
def sum_tile(  # noqa: PLR0913
    values, b, group, followers, pool, records, partials, num_rows, first, width,
    WARPS: tl.constexpr, J: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    SMALL_SPLITS: tl.constexpr, SMALL_ROWS: tl.constexpr,
):  # fmt: skip
    """values + h @ b, with what follows the tile's head: float32, as tile_places has it.

    b, group, followers: of the head   records, partials: at the slice
    """
    h = _load_h(
        partials, group, num_rows, b.dtype, WARPS, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS
    )
    total = add_ordered(values.to(tl.float32), h, b, WARPS, J)
    for unit in tl.range(followers[0], followers[1], num_stages=1):
        more = load_group(records + unit * 64)
        more_b = load_ordered_b(pool, more, first, width - first, width, WARPS, J)
        h = _load_h(
            partials, more, num_rows, b.dtype, WARPS, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS
        )
        total = add_ordered(total, h, more_b, WARPS, J)
    return total
