"""x @ A of every unit of a step's work list."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.shrink_fp12 import load_few_short, sum_few_short, sum_tile_short
from loramux.kernels.gpu.lora.tile_schedule import place_behind
from loramux.kernels.gpu.lora.work_item import (
    SMALL_HEADS,
    SMALL_UNITS,
    find_few,
    is_site_used,
    load_word,
    skip,
)
from loramux.kernels.gpu.pdl import opaque, pdl_wait


@triton.jit
def _load_few(  # noqa: PLR0913
    tile, num_tiles, pool, records, num_units,
    IN: tl.constexpr, SLICES: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A [RANKS, K] of a tile of few rows, its record, slice, first rank and split."""
    part, slice_index, address, shape, row_start, h_start = find_few(
        tile, num_tiles, records, num_units, (0, 0), SLICES
    )
    split = part // (16 // RANKS)
    first_rank = (part - split * (16 // RANKS)) * RANKS
    rank = first_rank + tl.arange(0, RANKS)[:, None]
    column = split * K + tl.arange(0, K)[None, :]
    mask = rank < (shape & 255)
    if IN % K != 0:
        mask = mask & (column < IN)
    source = pool + address.to(tl.int64) * 64 + rank * IN + column
    a = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")
    # Nothing to do where the adapter has no such ranks.
    num_rows = tl.where(first_rank < (shape & 255), shape >> 16, 0)
    return a, num_rows, row_start, h_start, slice_index, first_rank, split


@triton.jit
def _sum_few(  # noqa: PLR0913
    loaded, x, x_stride, partials, IN: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Few rows, all with the same weights, one after another."""
    a, num_rows, row_start, h_start, slice_index, first_rank, split = loaded
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    column = split * K + tl.arange(0, K)
    at = x + row_start.to(tl.int64) * x_stride + column
    out = partials + h_start.to(tl.int64) * H_STRIDE
    out += (slice_index * MAX_SPLITS + split) * 16 + first_rank + tl.arange(0, RANKS)
    for row in tl.range(num_rows, num_stages=1):
        row_at = at + row * x_stride
        values = tl.load(row_at) if IN % K == 0 else tl.load(row_at, mask=column < IN, other=0.0)
        # Without it all of a would be kept in float32, too: twice the registers of what was read.
        weights = opaque(a, COMPILED).to(tl.float32)
        sums = tl.sum(weights * values.to(tl.float32)[None, :], axis=1)
        tl.store(out + row * H_STRIDE, sums)


@triton.jit
def _sum_tile(  # noqa: PLR0913
    tile, pool, records, gap, x, x_stride, partials, IN: tl.constexpr, SLICES: tl.constexpr,
    TILE_K: tl.constexpr, STEP_K: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One group of ranks of every slice for a tile of rows, so that x is read once."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    unit = tile // SPLITS
    split = tile - unit * SPLITS
    record = records + skip(unit, gap) * 64
    # The ranks of all slices, in one line.
    line = tl.arange(0, 16 * triton.next_power_of_2(SLICES))
    of_slice = record + line // 16 * 8
    is_slice = line // 16 < SLICES
    address = load_word(of_slice, is_slice).to(tl.int64)
    is_rank = line % 16 < (load_word(of_slice + 2, is_slice) & 255)
    a = pool + address * 64 + line % 16 * IN
    num_rows = load_word(record + 2) >> 16
    rows = x + load_word(record + 3).to(tl.int64) * x_stride
    row = tl.arange(0, TILE_M)[:, None]
    sums = tl.zeros((TILE_M, 16 * triton.next_power_of_2(SLICES)), tl.float32)
    first = split * TILE_K
    for start in tl.range(first, tl.minimum(first + TILE_K, IN), STEP_K, num_stages=STAGES):
        column = start + tl.arange(0, STEP_K)[None, :]
        values = tl.load(
            rows + row * x_stride + column, mask=(row < num_rows) & (column < IN), other=0.0
        )
        weights = tl.load(a[:, None] + column, mask=is_rank[:, None] & (column < IN), other=0.0)
        sums = tl.dot(values, tl.trans(weights), sums, input_precision="ieee")
    out = partials + load_word(record + 4).to(tl.int64) * H_STRIDE + split * 16
    out += row * H_STRIDE + (line // 16 * (MAX_SPLITS * 16) + line % 16)[None, :]
    tl.store(out, sums, mask=(row < num_rows) & is_slice[None, :])


@triton.jit
def _sum_any_tile(  # noqa: PLR0913
    tile, pool, records, gap, x, x_stride, partials, IN: tl.constexpr, SLICES: tl.constexpr,
    SHORT: tl.constexpr, TILE_K: tl.constexpr, STEP_K: tl.constexpr, TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr, STAGES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    if SHORT:
        sum_tile_short(
            tile, pool, records, gap, x, x_stride, partials,
            IN, SLICES, TILE_K, TILE_M, MAX_SPLITS, STAGES, COMPILED,
        )  # fmt: skip
    else:
        _sum_tile(
            tile, pool, records, gap, x, x_stride, partials,
            IN, SLICES, TILE_K, STEP_K, TILE_M, MAX_SPLITS, STAGES,
        )  # fmt: skip


@triton.jit
def shrink_kernel(  # noqa: PLR0913
    pool,
    records,
    work,
    x,
    partials,
    record_start,
    x_stride,
    IN: tl.constexpr,
    SLICES: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    SMALL: tl.constexpr,
    ROW_K: tl.constexpr,
    ROW_RANKS: tl.constexpr,
    TILE_K: tl.constexpr,
    STEP_K: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Units of few rows, small tiles, then others. What hides a load is the other programs."""
    ROW_SPLITS: tl.constexpr = (IN + ROW_K - 1) // ROW_K
    TILE_SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    is_used = is_site_used(work, record_start, SLICES)
    row_units = load_word(work + 1)
    tile_heads = load_word(work + 2)
    tile_units = load_word(work + 3)
    small_heads = load_word(work + SMALL_HEADS)
    small_units = load_word(work + SMALL_UNITS)
    records += record_start
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    per_unit: tl.constexpr = SLICES * ROW_SPLITS * (16 // ROW_RANKS)
    num_units = row_units * is_used
    num_tiles = num_units * per_unit
    for tile in tl.range(program, num_tiles, programs, num_stages=1):
        if SHORT:
            loaded = load_few_short(
                tile, num_tiles, pool, records, num_units, (0, 0), IN, SLICES, ROW_K
            )
            pdl_wait(PDL)
            sum_few_short(loaded, x, x_stride, partials, IN, ROW_K, ROWS, MAX_SPLITS, COMPILED)
        else:
            loaded = _load_few(
                tile, num_tiles, pool, records, num_units, IN, SLICES, ROW_K, ROW_RANKS
            )
            pdl_wait(PDL)
            _sum_few(loaded, x, x_stride, partials, IN, ROW_K, ROW_RANKS, MAX_SPLITS, COMPILED)
    # From the other end: the last programs have had the fewest tiles of few rows.
    place = programs - 1 - program
    large_heads = tile_heads - small_heads
    num_tiles = 0
    if SMALL > 0:
        num_units = small_units * is_used
        num_tiles = num_units * per_unit
        tiles = records + row_units * 64
        gap = small_heads, large_heads
        for tile in tl.range(place, num_tiles, programs, num_stages=1):
            loaded = load_few_short(tile, num_tiles, pool, tiles, num_units, gap, IN, SLICES, ROW_K)
            pdl_wait(PDL)
            sum_few_short(loaded, x, x_stride, partials, IN, ROW_K, SMALL, MAX_SPLITS, COMPILED)
    pdl_wait(PDL)
    place = place_behind(place, num_tiles)
    num_tiles = (tile_units - small_units) * is_used * TILE_SPLITS
    tiles = records + (row_units + small_heads) * 64
    gap = large_heads, small_units - small_heads
    for tile in tl.range(place, num_tiles, programs, num_stages=1):
        _sum_any_tile(
            tile, pool, tiles, gap, x, x_stride, partials,
            IN, SLICES, SHORT, TILE_K, STEP_K, TILE_M, MAX_SPLITS, STAGES, COMPILED,
        )  # fmt: skip


@triton.jit
def _share(num_tiles):
    """This program's tiles; neighbours, since they have records and rows in common."""
    begin = tl.program_id(0) * num_tiles // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * num_tiles // tl.num_programs(0)
    return begin, end


@triton.jit
def shrink_tiles_kernel(  # noqa: PLR0913
    pool,
    records,
    work,
    x,
    partials,
    record_start,
    x_stride,
    IN: tl.constexpr,
    SLICES: tl.constexpr,
    SHORT: tl.constexpr,
    TILE_K: tl.constexpr,
    STEP_K: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Tiles alone, for prompts."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    begin, end = _share(tl.load(work + 3) * is_site_used(work, record_start, SLICES) * SPLITS)
    for tile in tl.range(begin, end, num_stages=1):
        _sum_any_tile(
            tile, pool, records + record_start, (0, 0), x, x_stride, partials,
            IN, SLICES, SHORT, TILE_K, STEP_K, TILE_M, MAX_SPLITS, STAGES, COMPILED,
        )  # fmt: skip
