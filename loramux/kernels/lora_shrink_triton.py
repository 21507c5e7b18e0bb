"""x @ A of every unit of a step's work list."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_word(record, live=True):
    """Of the tables, which should outlive the weights in the cache."""
    return tl.load(record, mask=live, other=0, eviction_policy="evict_last")


@triton.jit
def is_site_used(work, record_start, num_slices):
    """1 if any adapter of the step changes the site whose records begin there, else 0."""
    slice_index = tl.arange(0, 4)
    first = work + 4 + record_start % 64 // 8
    used = tl.load(first + slice_index, mask=slice_index < num_slices, other=0)
    return tl.max(used, 0)


@triton.jit
def load_group(pool, address, ranks, first, width, BLOCK: tl.constexpr):
    """Columns first.. of a group [ranks, width], as [16, BLOCK]; in the cache behind all else."""
    rank = tl.arange(0, 16)[:, None]
    column = first + tl.arange(0, BLOCK)[None, :]
    mask = (rank < ranks) & (column < width)
    source = pool + address.to(tl.int64) * 64 + rank * width + column
    return tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_few(  # noqa: PLR0913
    tile, num_tiles, pool, records, num_units, num_slices,
    IN: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A [RANKS, K] of a tile of few rows, its record, slice, first rank and split.

    Neighbours are units, so that those with fewer ranks than others are dealt to all programs.
    """
    per_part = tl.maximum(num_units * num_slices, 1)
    part = tile // per_part
    index = tile - part * per_part
    slice_index = index // tl.maximum(num_units, 1)
    record = records + ((index - slice_index * num_units) * 8 + slice_index) * 8
    live = tile < num_tiles
    address = load_word(record, live)
    shape = load_word(record + 2, live)
    row_start = load_word(record + 3, live)
    h_start = load_word(record + 4, live)
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
def _sum_rows(  # noqa: PLR0913
    a, num_rows, rows, x_stride, column, out, IN: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, H_STRIDE: tl.constexpr,
):  # fmt: skip
    """Up to ROWS rows, all with the same weights."""
    for row in tl.static_range(ROWS):
        left = tl.where(row < num_rows, IN, 0)
        if IN % K == 0 and ROWS == 1:
            values = tl.load(rows + column)
        else:
            values = tl.load(rows + row * x_stride + column, mask=column < left, other=0.0)
        sums = tl.sum(a.to(tl.float32) * values.to(tl.float32)[None, :], axis=1)
        rank = tl.arange(0, RANKS)
        tl.store(out + row * H_STRIDE + rank, sums, mask=rank < left)


@triton.jit
def _sum_few(  # noqa: PLR0913
    loaded, x, x_stride, partials, IN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    a, num_rows, row_start, h_start, slice_index, first_rank, split = loaded
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    column = split * K + tl.arange(0, K)
    rows = x + row_start.to(tl.int64) * x_stride
    out = partials + h_start.to(tl.int64) * H_STRIDE
    out += (slice_index * MAX_SPLITS + split) * 16 + first_rank
    if num_rows == 1:
        _sum_rows(a, 1, rows, x_stride, column, out, IN, K, 1, RANKS, H_STRIDE)
    elif num_rows > 1:
        _sum_rows(a, num_rows, rows, x_stride, column, out, IN, K, ROWS, RANKS, H_STRIDE)


@triton.jit
def _sum_tile(  # noqa: PLR0913
    tile, pool, records, num_units, x, x_stride, partials, IN: tl.constexpr, TILE_K: tl.constexpr,
    STEP_K: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One group of ranks for a tile of rows; the slices come one by one."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    index = tile // SPLITS
    split = tile - index * SPLITS
    slice_index = index // num_units
    record = records + ((index - slice_index * num_units) * 8 + slice_index) * 8
    a = pool + load_word(record).to(tl.int64) * 64
    shape = load_word(record + 2)
    num_rows = shape >> 16
    rows = x + load_word(record + 3).to(tl.int64) * x_stride
    row = tl.arange(0, TILE_M)[:, None]
    rank = tl.arange(0, 16)[:, None]
    sums = tl.zeros((TILE_M, 16), tl.float32)
    first = split * TILE_K
    for start in tl.range(first, tl.minimum(first + TILE_K, IN), STEP_K, num_stages=STAGES):
        column = start + tl.arange(0, STEP_K)[None, :]
        values = tl.load(
            rows + row * x_stride + column, mask=(row < num_rows) & (column < IN), other=0.0
        )
        weights = tl.load(
            a + rank * IN + column, mask=(rank < (shape & 255)) & (column < IN), other=0.0
        )
        sums = tl.dot(values, tl.trans(weights), sums, input_precision="ieee")
    out = partials + load_word(record + 4).to(tl.int64) * H_STRIDE
    out += (slice_index * MAX_SPLITS + split) * 16
    tl.store(out + row * H_STRIDE + tl.arange(0, 16)[None, :], sums, mask=row < num_rows)


@triton.jit
def shrink_kernel(  # noqa: PLR0913
    pool,
    records,
    work,
    x,
    partials,
    record_start,
    num_slices,
    x_stride,
    IN: tl.constexpr,
    ROW_K: tl.constexpr,
    ROW_RANKS: tl.constexpr,
    TILE_K: tl.constexpr,
    STEP_K: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Units of few rows, then tiles. What hides the time of a load is the other programs."""
    ROW_SPLITS: tl.constexpr = (IN + ROW_K - 1) // ROW_K
    TILE_SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    is_used = is_site_used(work, record_start, num_slices)
    row_units = load_word(work + 1) * is_used
    tile_units = load_word(work + 3) * is_used
    records += record_start
    num_tiles = row_units * num_slices * (ROW_SPLITS * (16 // ROW_RANKS))
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # At least one turn, for whoever has nothing to do must wait as well.
    for turn in tl.range(tl.maximum(tl.cdiv(num_tiles, programs), 1), num_stages=1):
        tile = turn * programs + program
        loaded = _load_few(
            tile, num_tiles, pool, records, row_units, num_slices, IN, ROW_K, ROW_RANKS
        )
        if PDL:  # noqa: SIM102 - known when compiling
            if turn == 0:
                tl.extra.cuda.gdc_wait()
        _sum_few(loaded, x, x_stride, partials, IN, ROW_K, ROWS, ROW_RANKS, MAX_SPLITS)
    # From the other end: the last programs have had the fewest tiles of few rows.
    num_tiles = tile_units * num_slices * TILE_SPLITS
    for tile in tl.range(programs - 1 - program, num_tiles, programs, num_stages=1):
        _sum_tile(
            tile, pool, records + row_units * 64, tile_units, x, x_stride, partials,
            IN, TILE_K, STEP_K, TILE_M, MAX_SPLITS, STAGES,
        )  # fmt: skip


@triton.jit
def _share(num_tiles):
    """This program's tiles; neighbours, since they have records and rows in common."""
    begin = tl.program_id(0) * num_tiles // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * num_tiles // tl.num_programs(0)
    return begin, end


@triton.jit
def shrink_wide_kernel(  # noqa: PLR0913
    pool,
    records,
    work,
    x,
    partials,
    record_start,
    num_slices,
    x_stride,
    IN: tl.constexpr,
    TILE_K: tl.constexpr,
    STEP_K: tl.constexpr,
    TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """All slices of a unit together, so that x is read once; for prompts."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    begin, end = _share(tl.load(work + 3) * is_site_used(work, record_start, num_slices) * SPLITS)
    rank = tl.arange(0, RANKS)
    row = tl.arange(0, TILE_M)[:, None]
    for tile in range(begin, end):
        split = tile % SPLITS
        record = records + record_start + (tile // SPLITS) * 64
        live = rank // 16 < num_slices
        address = tl.load(record + (rank // 16) * 8, mask=live, other=0).to(tl.int64)
        ranks = tl.load(record + (rank // 16) * 8 + 2, mask=live, other=0) & 255
        num_rows = tl.load(record + 2) >> 16
        rows = x + tl.load(record + 3).to(tl.int64) * x_stride
        a = pool + address * 64 + (rank % 16) * IN
        first = split * TILE_K
        sums = tl.zeros((TILE_M, RANKS), tl.float32)
        for start in range(first, tl.minimum(first + TILE_K, IN), STEP_K):
            column = start + tl.arange(0, STEP_K)
            values = tl.load(
                rows + row * x_stride + column[None, :],
                mask=(row < num_rows) & (column < IN)[None, :],
                other=0.0,
            )
            weights = tl.load(
                a[None, :] + column[:, None],
                mask=(rank % 16 < ranks)[None, :] & (column < IN)[:, None],
                other=0.0,
            )
            sums = tl.dot(values, weights, sums, input_precision="ieee")
        at = tl.load(record + 4).to(tl.int64) + row
        out = partials + at * (3 * MAX_SPLITS * 16) + split * 16
        out += (rank // 16 * (MAX_SPLITS * 16) + rank % 16)[None, :]
        tl.store(out, sums, mask=(row < num_rows) & live[None, :])
