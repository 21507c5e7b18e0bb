"""y + h @ B for a tile of 16 rows on tensor cores; h is the segmented shrink's partial sums."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.mma_layout import (
    fragment_columns,
    fragment_rows,
    load_b_fragments,
    mma_add,
)
from loramux.kernels.gpu.lora.work_item import RESOLVED_WORDS, load_block

TILE_ROWS = 16


@triton.jit
def tile_coordinates(rows, start, width, WARPS: tl.constexpr, J: tl.constexpr):
    """Rows and columns of a tile in the MMA fragment layout, and the mask of existing ones."""
    row = fragment_rows()
    column = fragment_columns(WARPS, J)
    return row, start + column, (row < rows) & (column < width - start)


@triton.jit
def _load_h(  # noqa: PLR0913
    partials, block, rows, dtype, WARPS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr, SMALL_SPLITS: tl.constexpr, SMALL_ROWS: tl.constexpr,
):  # fmt: skip
    """weight * h of all rows as each warp's first operand: [WARPS, 16, 16].

    All warps load it together and exchange it through shared memory. The shrink writes SMALL_SPLITS
    partial sums for a tile of up to SMALL_ROWS rows, SPLITS for others.
    """
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    num_splits = tl.where(rows <= SMALL_ROWS, SMALL_SPLITS, SPLITS)
    row = tl.arange(0, 16)[:, None]
    rank = tl.arange(0, 16)[None, :]
    at = partials + block[2].to(tl.int64) * H_STRIDE + row * H_STRIDE + rank
    # One mask for all ranks of a row, so that loads are vectorized. Rows that no shrink has written
    # may hold NaN.
    live = tl.where(block[1] > 0, rows, 0)
    h = tl.load(at, mask=row < live, other=0.0)
    MOST: tl.constexpr = SPLITS if SPLITS > SMALL_SPLITS else SMALL_SPLITS
    for split in tl.static_range(1, MOST):
        mask = row < tl.where(split < num_splits, live, 0)
        h += tl.load(at + split * 16, mask=mask, other=0.0)
    h = (h * block[3]).to(dtype)
    # The order of ranks in B's fragments: a thread's four ranks are two and two.
    h = tl.reshape(tl.permute(tl.reshape(h, (16, 4, 2, 2)), (0, 2, 1, 3)), (16, 16))
    return tl.broadcast_to(h[None, :, :], (WARPS, 16, 16))


@triton.jit
def expand_tile_sums(  # noqa: PLR0913
    values, b, block, next_range, pool, items, partials, rows, start, width,
    WARPS: tl.constexpr, J: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    SMALL_SPLITS: tl.constexpr, SMALL_ROWS: tl.constexpr,
):  # fmt: skip
    """values + h @ B over all rank blocks of the tile's rows: float32 in the layout of values.

    b, block, next_range are of the first item; items, partials point to the slice.
    """
    h = _load_h(partials, block, rows, b.dtype, WARPS, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS)
    total = mma_add(values.to(tl.float32), h, b, WARPS, J)
    for index in tl.range(next_range[0], next_range[1], num_stages=1):
        next_block = load_block(items + index * RESOLVED_WORDS)
        next_b = load_b_fragments(pool, next_block, start, width - start, width, WARPS, J)
        h = _load_h(
            partials, next_block, rows, b.dtype, WARPS, MAX_SPLITS, SPLITS, SMALL_SPLITS,
            SMALL_ROWS,
        )  # fmt: skip
        total = mma_add(total, h, next_b, WARPS, J)
    return total
