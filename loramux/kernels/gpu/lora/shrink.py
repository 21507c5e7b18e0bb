"""h = x @ A for every item of a step's work list, as split-K partial sums.

A in the model's dtype is multiplied by vector FMAs for few rows and by tensor cores for tiles; A in
fp12 by tensor cores in both cases. The four warps of an fp12 shrink take a quarter of the columns
each, or one slice of the site each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.fp12 import FP12_SCALE, load_planes, unpack_fp12
from loramux.kernels.gpu.lora.work_item import (
    A_ADDRESS,
    ALIGN,
    H_START,
    ITEM_WORDS,
    NUM_ROWS,
    RESOLVED_WORDS,
    ROW_ITEMS,
    ROW_START,
    SMALL_FIRST,
    SMALL_ITEMS,
    TILE_FIRST,
    TILE_ITEMS,
    is_site_used,
    load_word,
    locate_rows_tile,
    num_ranks,
    num_rows,
    rank_after,
    skip_gap,
)
from loramux.kernels.gpu.pdl import axis, opaque, pdl_wait

MOST_ROWS = 8
"""Rows of an fp12 shrink of few rows: N of the smallest MMA; fewer rows are repeated."""
_MOST_ROWS: tl.constexpr = tl.constexpr(MOST_ROWS)
_WARPS: tl.constexpr = tl.constexpr(4)


# ---- A in the model's dtype -----------------------------------------------------------------


@triton.jit
def _load_rows_a(  # noqa: PLR0913
    tile, num_tiles, pool, items, num_items,
    IN: tl.constexpr, SLICES: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Load A [RANKS, K] of a tile of few rows, and its rows, H_START, slice, first rank, split."""
    part, slice_index, address, shape, row_start, h_start = locate_rows_tile(
        tile, num_tiles, items, num_items, (0, 0), SLICES
    )
    split = part // (16 // RANKS)
    first_rank = (part - split * (16 // RANKS)) * RANKS
    rank = first_rank + tl.arange(0, RANKS)[:, None]
    column = split * K + tl.arange(0, K)[None, :]
    mask = rank < num_ranks(shape)
    if IN % K != 0:
        mask = mask & (column < IN)
    source = pool + address.to(tl.int64) * ALIGN + rank * IN + column
    a = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")
    # The adapter may have fewer ranks: then there is nothing to compute.
    rows = tl.where(first_rank < num_ranks(shape), num_rows(shape), 0)
    return a, rows, row_start, h_start, slice_index, first_rank, split


@triton.jit
def _sum_rows(  # noqa: PLR0913
    loaded, x, x_stride, partials, IN: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of few rows of one adapter, one row after another."""
    a, rows, row_start, h_start, slice_index, first_rank, split = loaded
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    column = split * K + tl.arange(0, K)
    at = x + row_start.to(tl.int64) * x_stride + column
    out = partials + h_start.to(tl.int64) * H_STRIDE
    out += (slice_index * MAX_SPLITS + split) * 16 + first_rank + tl.arange(0, RANKS)
    for row in tl.range(rows, num_stages=1):
        row_at = at + row * x_stride
        values = tl.load(row_at) if IN % K == 0 else tl.load(row_at, mask=column < IN, other=0.0)
        # Without `opaque` the compiler hoists the conversion of a to float32 out of the loop, which
        # takes twice the registers of a itself.
        weights = opaque(a, COMPILED).to(tl.float32)
        sums = tl.sum(weights * values.to(tl.float32)[None, :], axis=1)
        tl.store(out + row * H_STRIDE, sums)


@triton.jit
def _sum_tile(  # noqa: PLR0913
    tile, pool, items, gap, x, x_stride, partials, IN: tl.constexpr, SLICES: tl.constexpr,
    TILE_K: tl.constexpr, STEP_K: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one split of one rank block of every slice for a tile of rows; x is read once."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    index = tile // SPLITS
    split = tile - index * SPLITS
    item = items + skip_gap(index, gap) * RESOLVED_WORDS
    # The ranks of all slices, one after the other.
    line = tl.arange(0, 16 * triton.next_power_of_2(SLICES))
    of_slice = item + line // 16 * ITEM_WORDS
    is_slice = line // 16 < SLICES
    address = load_word(of_slice + A_ADDRESS, is_slice).to(tl.int64)
    is_rank = line % 16 < num_ranks(load_word(of_slice + NUM_ROWS, is_slice))
    a = pool + address * ALIGN + line % 16 * IN
    rows = num_rows(load_word(item + NUM_ROWS))
    first_row = x + load_word(item + ROW_START).to(tl.int64) * x_stride
    row = tl.arange(0, TILE_M)[:, None]
    sums = tl.zeros((TILE_M, 16 * triton.next_power_of_2(SLICES)), tl.float32)
    first = split * TILE_K
    for start in tl.range(first, tl.minimum(first + TILE_K, IN), STEP_K, num_stages=STAGES):
        column = start + tl.arange(0, STEP_K)[None, :]
        values = tl.load(
            first_row + row * x_stride + column, mask=(row < rows) & (column < IN), other=0.0
        )
        weights = tl.load(a[:, None] + column, mask=is_rank[:, None] & (column < IN), other=0.0)
        sums = tl.dot(values, tl.trans(weights), sums, input_precision="ieee")
    out = partials + load_word(item + H_START).to(tl.int64) * H_STRIDE + split * 16
    out += row * H_STRIDE + (line // 16 * (MAX_SPLITS * 16) + line % 16)[None, :]
    tl.store(out, sums, mask=(row < rows) & is_slice[None, :])


# ---- A in fp12 ------------------------------------------------------------------------------


@triton.jit
def _fp12_words(pool, address):
    """Return a pointer to the 32-bit words at an address of the pool."""
    return pool.to(tl.pointer_type(tl.int32), bitcast=True) + address.to(tl.int64) * (ALIGN // 2)


@triton.jit
def _load_rows_fp12(  # noqa: PLR0913
    tile, num_tiles, pool, items, num_items, gap,
    IN: tl.constexpr, SLICES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Load A's words (warps, 2 octets, blocks, 128) of few rows; rows, H_START, slice, split."""
    split, slice_index, address, shape, row_start, h_start = locate_rows_tile(
        tile, num_tiles, items, num_items, gap, SLICES
    )
    ranks = num_ranks(shape)
    warp = axis(_WARPS, 0, 4)
    octet = axis(2, 1, 4)
    column = split * K + warp * (K // _WARPS) + axis(128, 3, 4)
    column += axis(K // (128 * _WARPS), 2, 4) * 128
    mask = octet * 8 < ranks
    if IN % K != 0:
        mask = mask & (column < IN)
    words = _fp12_words(pool, address) + octet * (3 * IN)
    planes = load_planes(words + column, IN, mask, "evict_first")
    # The adapter may leave this layer unchanged: then there is nothing to compute.
    rows = tl.where(ranks > 0, num_rows(shape), 0)
    return planes, rows, row_start, h_start, slice_index, split


@triton.jit
def _sum_rows_fp12(  # noqa: PLR0913
    loaded, x, x_stride, partials, IN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of up to ROWS rows, a power of two; the last row is repeated."""
    planes, rows, row_start, h_start, slice_index, split = loaded
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    COLUMNS: tl.constexpr = K // _WARPS
    if rows > 0:
        row = tl.minimum(tl.arange(0, ROWS), rows - 1)[:, None]
        column = split * K + tl.arange(0, K)[None, :]
        at = x + row_start.to(tl.int64) * x_stride + row * x_stride + column
        values = tl.load(at) if IN % K == 0 else tl.load(at, mask=column < IN, other=0.0)
        if not COMPILED:
            values = values.to(tl.float32)
        values = tl.permute(tl.reshape(values, (ROWS, _WARPS, COLUMNS)), (1, 2, 0))
        values = tl.reshape(values, (_WARPS, COLUMNS, 1, ROWS))
        values = tl.broadcast_to(values, (_WARPS, COLUMNS, _MOST_ROWS // ROWS, ROWS))
        values = tl.reshape(values, (_WARPS, COLUMNS, _MOST_ROWS))
        weights = unpack_fp12(planes, _WARPS, 2, COLUMNS // 128, COMPILED)
        sums = tl.sum(tl.dot(weights, values, input_precision="ieee"), 0) * FP12_SCALE
        row = tl.arange(0, _MOST_ROWS)[None, :]
        out = partials + h_start.to(tl.int64) * H_STRIDE
        out += (slice_index * MAX_SPLITS + split) * 16 + tl.arange(0, 16)[:, None]
        tl.store(out + row * H_STRIDE, sums, mask=row < rows)


@triton.jit
def _sum_tile_fp12(  # noqa: PLR0913
    tile, pool, items, gap, x, x_stride, partials, IN: tl.constexpr, SLICES: tl.constexpr,
    TILE_K: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute one split of one rank block of every slice for a tile of rows; x is read once."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    # A warp has one slice. With fewer slices than that every warp has all of them, and a quarter
    # of the columns.
    BY_SLICE: tl.constexpr = SLICES > 2
    LINES: tl.constexpr = triton.next_power_of_2(SLICES)
    OCTETS: tl.constexpr = 2 if BY_SLICE else 2 * LINES
    STEP: tl.constexpr = 128 if BY_SLICE else 128 * _WARPS
    index = tile // SPLITS
    split = tile - index * SPLITS
    item = items + skip_gap(index, gap) * RESOLVED_WORDS
    warp = axis(_WARPS, 0, 4)
    octet = axis(OCTETS, 1, 4)
    slice_index = warp + octet // 2 if BY_SLICE else warp * 0 + octet // 2
    part = warp * 0 if BY_SLICE else warp
    is_slice = slice_index < SLICES
    address = load_word(item + slice_index * ITEM_WORDS + A_ADDRESS, is_slice)
    ranks = num_ranks(load_word(item + slice_index * ITEM_WORDS + NUM_ROWS, is_slice))
    words = _fp12_words(pool, address) + octet % 2 * (3 * IN)
    rows = num_rows(load_word(item + NUM_ROWS))
    first_row = x + load_word(item + ROW_START).to(tl.int64) * x_stride
    row = tl.arange(0, TILE_M)[:, None]
    sums = tl.zeros((_WARPS, OCTETS * 8, TILE_M), tl.float32)
    first = split * TILE_K
    # Where one step covers all columns there is nothing to prefetch.
    DEPTH: tl.constexpr = STAGES if BY_SLICE else 1
    for start in tl.range(first, tl.minimum(first + TILE_K, IN), STEP, num_stages=DEPTH):
        values = _load_x(first_row, x_stride, row, rows, start, IN, STEP, COMPILED)
        word = start + part * 128 + axis(128, 3, 4)
        mask = (octet % 2 * 8 < ranks) & (word < IN)
        planes = load_planes(words + word, IN, mask, "")
        weights = unpack_fp12(planes, _WARPS, OCTETS, 1, COMPILED)
        if BY_SLICE:
            values = tl.broadcast_to(tl.trans(values)[None, :, :], (_WARPS, 128, TILE_M))
        else:
            values = tl.permute(tl.reshape(values, (TILE_M, _WARPS, 128)), (1, 2, 0))
        sums = tl.dot(weights, values, sums, input_precision="ieee")
    total = tl.reshape(sums, (_WARPS * 16, TILE_M)) if BY_SLICE else tl.sum(sums, 0)
    line = tl.arange(0, 16 * LINES)[:, None]
    row = tl.arange(0, TILE_M)[None, :]
    out = partials + load_word(item + H_START).to(tl.int64) * H_STRIDE + split * 16
    out += row * H_STRIDE + line // 16 * (MAX_SPLITS * 16) + line % 16
    tl.store(out, total * FP12_SCALE, mask=(row < rows) & (line // 16 < SLICES))


@triton.jit
def _load_x(  # noqa: PLR0913
    first_row, x_stride, row, rows, start, IN: tl.constexpr, STEP: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Load columns start.. of a tile of x; float32 in the interpreter."""
    column = start + tl.arange(0, STEP)[None, :]
    values = tl.load(
        first_row + row * x_stride + column, mask=(row < rows) & (column < IN), other=0.0
    )
    if not COMPILED:
        values = values.to(tl.float32)
    return values


# ---- The kernels ----------------------------------------------------------------------------


@triton.jit
def _shrink_rows(  # noqa: PLR0913
    tile, num_tiles, pool, items, num_items, x, x_stride, partials,
    IN: tl.constexpr, SLICES: tl.constexpr, FP12: tl.constexpr, ROWS: tl.constexpr,
    K: tl.constexpr, RANKS: tl.constexpr, MAX_SPLITS: tl.constexpr, COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Shrinks a tile of few rows; A is loaded before the kernel ahead has finished."""
    if FP12:
        loaded = _load_rows_fp12(tile, num_tiles, pool, items, num_items, (0, 0), IN, SLICES, K)
        pdl_wait(PDL)
        _sum_rows_fp12(loaded, x, x_stride, partials, IN, K, ROWS, MAX_SPLITS, COMPILED)
    else:
        loaded = _load_rows_a(tile, num_tiles, pool, items, num_items, IN, SLICES, K, RANKS)
        pdl_wait(PDL)
        _sum_rows(loaded, x, x_stride, partials, IN, K, RANKS, MAX_SPLITS, COMPILED)


@triton.jit
def _shrink_tile(  # noqa: PLR0913
    tile, pool, items, gap, x, x_stride, partials, IN: tl.constexpr, SLICES: tl.constexpr,
    FP12: tl.constexpr, TILE_K: tl.constexpr, STEP_K: tl.constexpr, TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr, STAGES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    if FP12:
        _sum_tile_fp12(
            tile, pool, items, gap, x, x_stride, partials,
            IN, SLICES, TILE_K, TILE_M, MAX_SPLITS, STAGES, COMPILED,
        )  # fmt: skip
    else:
        _sum_tile(
            tile, pool, items, gap, x, x_stride, partials,
            IN, SLICES, TILE_K, STEP_K, TILE_M, MAX_SPLITS, STAGES,
        )  # fmt: skip


@triton.jit
def shrink_kernel(  # noqa: PLR0913
    pool, items, work, x, partials, item_start, x_stride,
    IN: tl.constexpr, SLICES: tl.constexpr, FP12: tl.constexpr, ROWS: tl.constexpr,
    SMALL: tl.constexpr, ROW_K: tl.constexpr, ROW_RANKS: tl.constexpr, TILE_K: tl.constexpr,
    STEP_K: tl.constexpr, STAGES: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr,
    COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Shrinks items of few rows, small tiles, then other tiles.

    Latency is hidden by the other CTAs of an SM.
    """
    ROW_SPLITS: tl.constexpr = (IN + ROW_K - 1) // ROW_K
    TILE_SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    per_item: tl.constexpr = SLICES * ROW_SPLITS * (16 // ROW_RANKS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    is_used = is_site_used(work, item_start, SLICES)
    row_items = load_word(work + ROW_ITEMS)
    small_first = load_word(work + SMALL_FIRST)
    large_first = load_word(work + TILE_FIRST) - small_first
    tile_items = load_word(work + TILE_ITEMS)
    small_items = load_word(work + SMALL_ITEMS)
    items += item_start
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    num_items = row_items * is_used
    num_tiles = num_items * per_item
    for tile in tl.range(program, num_tiles, programs, num_stages=1):
        _shrink_rows(
            tile, num_tiles, pool, items, num_items, x, x_stride, partials,
            IN, SLICES, FP12, ROWS, ROW_K, ROW_RANKS, MAX_SPLITS, COMPILED, PDL,
        )  # fmt: skip
    # In reverse: the last CTAs have had the fewest tiles of few rows.
    rank = programs - 1 - program
    num_tiles = 0
    if SMALL > 0:
        num_items = small_items * is_used
        num_tiles = num_items * per_item
        tiles = items + row_items * RESOLVED_WORDS
        gap = small_first, large_first
        for tile in tl.range(rank, num_tiles, programs, num_stages=1):
            loaded = _load_rows_fp12(
                tile, num_tiles, pool, tiles, num_items, gap, IN, SLICES, ROW_K
            )
            pdl_wait(PDL)
            _sum_rows_fp12(loaded, x, x_stride, partials, IN, ROW_K, SMALL, MAX_SPLITS, COMPILED)
    pdl_wait(PDL)
    rank = rank_after(rank, num_tiles)
    num_tiles = (tile_items - small_items) * is_used * TILE_SPLITS
    tiles = items + (row_items + small_first) * RESOLVED_WORDS
    gap = large_first, small_items - small_first
    for tile in tl.range(rank, num_tiles, programs, num_stages=1):
        _shrink_tile(
            tile, pool, tiles, gap, x, x_stride, partials,
            IN, SLICES, FP12, TILE_K, STEP_K, TILE_M, MAX_SPLITS, STAGES, COMPILED,
        )  # fmt: skip


@triton.jit
def _consecutive(num_tiles):
    """Return this CTA's range of tiles; they are consecutive, since neighbours share items and
    rows.
    """
    begin = tl.program_id(0) * num_tiles // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * num_tiles // tl.num_programs(0)
    return begin, end


@triton.jit
def shrink_tiles_kernel(  # noqa: PLR0913
    pool, items, work, x, partials, item_start, x_stride,
    IN: tl.constexpr, SLICES: tl.constexpr, FP12: tl.constexpr, TILE_K: tl.constexpr,
    STEP_K: tl.constexpr, STAGES: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Shrinks the tiles of a work list without items of few rows (prefill)."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    is_used = is_site_used(work, item_start, SLICES)
    begin, end = _consecutive(tl.load(work + TILE_ITEMS) * is_used * SPLITS)
    for tile in tl.range(begin, end, num_stages=1):
        _shrink_tile(
            tile, pool, items + item_start, (0, 0), x, x_stride, partials,
            IN, SLICES, FP12, TILE_K, STEP_K, TILE_M, MAX_SPLITS, STAGES, COMPILED,
        )  # fmt: skip
