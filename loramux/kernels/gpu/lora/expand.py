"""y += h @ B for every first item of a step's work list: vector FMAs for few rows, MMA for tiles.

A CTA requests B of its first tile before it waits for the kernel ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.expand_mma import expand_tile_sums, tile_coordinates
from loramux.kernels.gpu.lora.mma_layout import load_b_fragments
from loramux.kernels.gpu.lora.tables import OUTPUTS_PER_THREAD
from loramux.kernels.gpu.lora.work_item import (
    ITEM_WORDS,
    RESOLVED_WORDS,
    ROW_FIRST,
    ROW_ITEMS,
    TILE_FIRST,
    is_site_used,
    load_block,
    load_first_item,
    load_next_range,
    load_word,
    rank_after_waves,
    tile_of_wave,
)
from loramux.kernels.gpu.pdl import axis, pdl_wait

_ADJACENT: tl.constexpr = tl.constexpr(OUTPUTS_PER_THREAD)


# ---- Few rows: a thread holds all ranks of its outputs --------------------------------------


@triton.jit
def row_columns(N: tl.constexpr):
    """0 .. N; the axes: threads, ranks, adjacent outputs"""
    return axis(N // _ADJACENT, 0, 3) * _ADJACENT + axis(_ADJACENT, 2, 3)


@triton.jit
def load_row_b(pool, block, start, width, N: tl.constexpr):
    """N columns, from start on, of a rank block's B [ranks, width]; first to leave the L2 cache."""
    rank = axis(16, 1, 3)
    column = start + row_columns(N)
    mask = (rank < block[1]) & (column < width)
    source = pool + block[0] + rank * width + column
    return tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_row_h(  # noqa: PLR0913
    partials, block, row, rows, dtype, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """weight * h [16] of one row, rounded as for tensor cores: a row in a tile gets the same."""
    rank = tl.arange(0, 16)
    h = partials + (block[2] + row).to(tl.int64) * (3 * MAX_SPLITS * 16)
    split = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None]
    live_ranks = tl.where(row < rows, block[1], 0)
    mask = (split < SPLITS) & (rank < live_ranks)[None, :]
    sums = tl.sum(tl.load(h + split * 16 + rank[None, :], mask=mask, other=0.0), 0)
    return (sums * block[3]).to(dtype).to(tl.float32)


@triton.jit
def _multiply(h, b):
    """h @ b of one row; h [16]"""
    return tl.sum(b.to(tl.float32) * h[None, :, None], 1, keep_dims=True)


@triton.jit
def expand_row_sums(  # noqa: PLR0913
    b, block, next_range, pool, items, partials, y, y_stride, rows, start, width,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y + h @ B of up to ROWS rows over all their rank blocks: one float32 tensor per row.

    b, block, next_range are of the first item; items, partials point to the slice, y to the first
    row.
    """
    column = start + row_columns(N)
    values: tl.tuple = ()
    for row in tl.static_range(ROWS):
        inside = column < tl.where(row < rows, width, 0)
        value = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        h = _load_row_h(partials, block, row, rows, b.dtype, MAX_SPLITS, SPLITS)
        values = values + (value + _multiply(h, b),)
    for index in tl.range(next_range[0], next_range[1], num_stages=1):
        next_block = load_block(items + index * RESOLVED_WORDS)
        next_b = load_row_b(pool, next_block, start, width, N)
        added: tl.tuple = ()
        for row in tl.static_range(ROWS):
            h = _load_row_h(partials, next_block, row, rows, b.dtype, MAX_SPLITS, SPLITS)
            added = added + (values[row] + _multiply(h, next_b),)
        values = added
    return values


@triton.jit
def store_row(value, target, row, rows, start, width, N: tl.constexpr):
    """Store one tensor of expand_row_sums at `target`, if row < rows."""
    column = start + row_columns(N)
    inside = column < tl.where(row < rows, width, 0)
    tl.store(target + column, value.to(target.dtype.element_ty), mask=inside)


# ---- The kernel -----------------------------------------------------------------------------


@triton.jit
def _num_chunks(width0, width1, width2, N: tl.constexpr):
    """Tiles of N columns of one first item."""
    return tl.cdiv(width0, N) + tl.cdiv(width1, N) + tl.cdiv(width2, N)


@triton.jit
def _locate(tile, width0, width1, width2, N: tl.constexpr):
    """First item, slice, first column in the slice, the slice's first column in y, its width."""
    chunks = _num_chunks(width0, width1, width2, N)
    index = tile // chunks
    start = (tile - index * chunks) * N
    covered0 = tl.cdiv(width0, N) * N
    covered1 = tl.cdiv(width1, N) * N
    is_past0 = start >= covered0
    is_past1 = start >= covered0 + covered1
    start -= tl.where(is_past0, covered0, 0) + tl.where(is_past1, covered1, 0)
    width = tl.where(is_past1, width2, tl.where(is_past0, width1, width0))
    slice_index = tl.where(is_past0, 1, 0) + tl.where(is_past1, 1, 0)
    out_start = tl.where(is_past0, width0, 0) + tl.where(is_past1, width1, 0)
    return index, slice_index, start, out_start, width


@triton.jit
def _changed_rows(block, next_range, rows):
    """Return the number of rows, or 0 where the adapters leave this layer unchanged."""
    return tl.where((block[1] > 0) | (next_range[0] < next_range[1]), rows, 0)


@triton.jit
def _add_rows(  # noqa: PLR0913
    b, block, next_range, pool, items, partials, y, y_stride, rows, start, width,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    values = expand_row_sums(
        b, block, next_range, pool, items, partials, y, y_stride, rows, start, width,
        N, ROWS, MAX_SPLITS, SPLITS,
    )  # fmt: skip
    for row in tl.static_range(ROWS):
        store_row(values[row], y + row * y_stride, row, rows, start, width, N)


@triton.jit
def _expand_rows(  # noqa: PLR0913
    tile, num_first, pool, items, partials, y, y_stride, width0, width1, width2,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    index, slice_index, start, out_start, width = _locate(tile, width0, width1, width2, N)
    items += slice_index * ITEM_WORDS
    # CTAs without a tile in the last wave clamp to the last item; their result is masked.
    item = items + tl.minimum(index, num_first - 1) * RESOLVED_WORDS
    block, rows, row_start = load_first_item(item)
    next_range = load_next_range(item)
    b = load_row_b(pool, block, start, width, N)
    pdl_wait(PDL)
    rows = _changed_rows(block, next_range, tl.where(index < num_first, rows, 0))
    partials += slice_index * (MAX_SPLITS * 16)
    y += row_start * y_stride + out_start
    if rows == 1:
        _add_rows(
            b, block, next_range, pool, items, partials, y, y_stride, 1, start, width,
            N, 1, MAX_SPLITS, SPLITS,
        )  # fmt: skip
    elif rows > 1:
        _add_rows(
            b, block, next_range, pool, items, partials, y, y_stride, rows, start, width,
            N, ROWS, MAX_SPLITS, SPLITS,
        )  # fmt: skip


@triton.jit
def _expand_tile(  # noqa: PLR0913
    tile, pool, items, first_items, partials, y, y_stride, width0, width1, width2,
    WARPS: tl.constexpr, J: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    SMALL_SPLITS: tl.constexpr, SMALL_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Expand a tile of rows; first_items points to the first item that is a tile."""
    index, slice_index, start, out_start, width = _locate(
        tile, width0, width1, width2, WARPS * 8 * J
    )
    item = first_items + index * RESOLVED_WORDS + slice_index * ITEM_WORDS
    block, rows, row_start = load_first_item(item)
    next_range = load_next_range(item)
    b = load_b_fragments(pool, block, start, width - start, width, WARPS, J)
    pdl_wait(PDL)
    changed = _changed_rows(block, next_range, rows)
    row, column, inside = tile_coordinates(changed, start, width, WARPS, J)
    at = y + (row_start + row) * y_stride + out_start + column
    values = tl.load(at, mask=inside, other=0.0)
    total = expand_tile_sums(
        values, b, block, next_range, pool, items + slice_index * ITEM_WORDS,
        partials + slice_index * (MAX_SPLITS * 16), rows, start, width,
        WARPS, J, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS,
    )  # fmt: skip
    tl.store(at, total.to(values.dtype), mask=inside)


@triton.jit
def expand_kernel(  # noqa: PLR0913
    pool, items, work, partials, y, item_start, y_stride, width0, width1, width2,
    MAX_SPLITS: tl.constexpr, ROW_SPLITS: tl.constexpr, TILE_SPLITS: tl.constexpr,
    ROWS: tl.constexpr, SMALL_ROWS: tl.constexpr, ROW_N: tl.constexpr, WARPS: tl.constexpr,
    J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Expand first items of few rows, then tiles; latency is hidden by the other CTAs of an SM."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_slices = 1 + (width1 > 0).to(tl.int32) + (width2 > 0).to(tl.int32)
    is_used = is_site_used(work, item_start, num_slices)
    row_first = load_word(work + ROW_FIRST) * is_used
    row_items = load_word(work + ROW_ITEMS)
    tile_first = load_word(work + TILE_FIRST) * is_used
    items += item_start
    programs = tl.num_programs(0)
    num_tiles = row_first * _num_chunks(width0, width1, width2, ROW_N)
    for wave in tl.range(tl.cdiv(num_tiles, programs), num_stages=1):
        _expand_rows(
            tile_of_wave(wave), row_first, pool, items, partials, y, y_stride,
            width0, width1, width2, ROW_N, ROWS, MAX_SPLITS, ROW_SPLITS, PDL,
        )  # fmt: skip
    rank = rank_after_waves(num_tiles)
    num_tiles = tile_first * _num_chunks(width0, width1, width2, WARPS * 8 * J)
    for tile in tl.range(rank, num_tiles, programs, num_stages=1):
        _expand_tile(
            tile, pool, items, items + row_items * RESOLVED_WORDS, partials, y, y_stride,
            width0, width1, width2, WARPS, J, MAX_SPLITS, TILE_SPLITS, ROW_SPLITS, SMALL_ROWS, PDL,
        )  # fmt: skip
    pdl_wait(PDL)
