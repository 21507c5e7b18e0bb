"""y += h @ B of every head of a step's work list.

B of a program's first tile is asked for before it waits for the kernel ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.expand_mma import sum_tile, tile_places
from loramux.kernels.gpu.lora.expand_rows import load_few_b, store_few, sum_few
from loramux.kernels.gpu.lora.mma_layout import load_ordered_b
from loramux.kernels.gpu.lora.tile_schedule import place_behind_turns, tile_of_turn
from loramux.kernels.gpu.lora.work_item import is_site_used, load_word
from loramux.kernels.gpu.lora_augmented.rank_block import load_followers, load_head
from loramux.kernels.gpu.pdl import pdl_wait


@triton.jit
def _num_chunks(width0, width1, width2, N: tl.constexpr):
    """Tiles of one head."""
    return tl.cdiv(width0, N) + tl.cdiv(width1, N) + tl.cdiv(width2, N)


@triton.jit
def _locate(tile, width0, width1, width2, N: tl.constexpr):
    """Head, slice, first column in the slice, the slice's first column in y, and its width."""
    chunks = _num_chunks(width0, width1, width2, N)
    head = tile // chunks
    first = (tile - head * chunks) * N
    covered0 = tl.cdiv(width0, N) * N
    covered1 = tl.cdiv(width1, N) * N
    is_past0 = first >= covered0
    is_past1 = first >= covered0 + covered1
    first -= tl.where(is_past0, covered0, 0) + tl.where(is_past1, covered1, 0)
    width = tl.where(is_past1, width2, tl.where(is_past0, width1, width0))
    slice_index = tl.where(is_past0, 1, 0) + tl.where(is_past1, 1, 0)
    out_start = tl.where(is_past0, width0, 0) + tl.where(is_past1, width1, 0)
    return head, slice_index, first, out_start, width


@triton.jit
def _changed_rows(group, followers, num_rows):
    """None, where the adapters leave this layer alone."""
    return tl.where((group[1] > 0) | (followers[0] < followers[1]), num_rows, 0)


@triton.jit
def _add_few(  # noqa: PLR0913
    b, group, followers, pool, records, partials, y, y_stride, num_rows, first, width,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    values = sum_few(
        b, group, followers, pool, records, partials, y, y_stride, num_rows, first, width,
        N, ROWS, MAX_SPLITS, SPLITS,
    )  # fmt: skip
    for row in tl.static_range(ROWS):
        store_few(values[row], y + row * y_stride, row, num_rows, first, width, N)


@triton.jit
def _expand_few(  # noqa: PLR0913
    tile, num_heads, pool, records, partials, y, y_stride, width0, width1, width2,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head, slice_index, first, out_start, width = _locate(tile, width0, width1, width2, N)
    records += slice_index * 8
    # Who has none in the last turn reads the last one's, for nothing.
    record = records + tl.minimum(head, num_heads - 1) * 64
    group, num_rows, row_start = load_head(record)
    followers = load_followers(record)
    b = load_few_b(pool, group, first, width, N)
    pdl_wait(PDL)
    num_rows = _changed_rows(group, followers, tl.where(head < num_heads, num_rows, 0))
    partials += slice_index * (MAX_SPLITS * 16)
    y += row_start * y_stride + out_start
    if num_rows == 1:
        _add_few(
            b, group, followers, pool, records, partials, y, y_stride, 1, first, width,
            N, 1, MAX_SPLITS, SPLITS,
        )  # fmt: skip
    elif num_rows > 1:
        _add_few(
            b, group, followers, pool, records, partials, y, y_stride, num_rows, first, width,
            N, ROWS, MAX_SPLITS, SPLITS,
        )  # fmt: skip


@triton.jit
def _expand_tile(  # noqa: PLR0913
    tile, pool, records, of_heads, partials, y, y_stride, width0, width1, width2,
    WARPS: tl.constexpr, J: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    SMALL_SPLITS: tl.constexpr, SMALL_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """of_heads: records of the first tile"""
    head, slice_index, first, out_start, width = _locate(
        tile, width0, width1, width2, WARPS * 8 * J
    )
    record = of_heads + head * 64 + slice_index * 8
    group, num_rows, row_start = load_head(record)
    followers = load_followers(record)
    b = load_ordered_b(pool, group, first, width - first, width, WARPS, J)
    pdl_wait(PDL)
    changed = _changed_rows(group, followers, num_rows)
    row, column, inside = tile_places(changed, first, width, WARPS, J)
    at = y + (row_start + row) * y_stride + out_start + column
    values = tl.load(at, mask=inside, other=0.0)
    total = sum_tile(
        values, b, group, followers, pool, records + slice_index * 8,
        partials + slice_index * (MAX_SPLITS * 16), num_rows, first, width,
        WARPS, J, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS,
    )  # fmt: skip
    tl.store(at, total.to(values.dtype), mask=inside)


@triton.jit
def expand_kernel(  # noqa: PLR0913
    pool,
    records,
    work,
    partials,
    y,
    record_start,
    y_stride,
    width0,
    width1,
    width2,
    MAX_SPLITS: tl.constexpr,
    ROW_SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    ROW_N: tl.constexpr,
    WARPS: tl.constexpr,
    J: tl.constexpr,
    PDL: tl.constexpr,
):
    """Heads of few rows, then tiles. What hides the time of a load is the other programs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_slices = 1 + (width1 > 0).to(tl.int32) + (width2 > 0).to(tl.int32)
    is_used = is_site_used(work, record_start, num_slices)
    row_heads = load_word(work) * is_used
    row_units = load_word(work + 1)
    tile_heads = load_word(work + 2) * is_used
    records += record_start
    programs = tl.num_programs(0)
    num_tiles = row_heads * _num_chunks(width0, width1, width2, ROW_N)
    for turn in tl.range(tl.cdiv(num_tiles, programs), num_stages=1):
        _expand_few(
            tile_of_turn(turn), row_heads, pool, records, partials, y, y_stride,
            width0, width1, width2, ROW_N, ROWS, MAX_SPLITS, ROW_SPLITS, PDL,
        )  # fmt: skip
    place = place_behind_turns(num_tiles)
    num_tiles = tile_heads * _num_chunks(width0, width1, width2, WARPS * 8 * J)
    for tile in tl.range(place, num_tiles, programs, num_stages=1):
        _expand_tile(
            tile, pool, records, records + row_units * 64, partials, y, y_stride,
            width0, width1, width2, WARPS, J, MAX_SPLITS, TILE_SPLITS, ROW_SPLITS, SMALL_ROWS, PDL,
        )  # fmt: skip
    pdl_wait(PDL)
