"""x @ A of every unit of a step's work list."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share(num_tiles):
    """This program's tiles; neighbours, since they have records and rows in common."""
    begin = tl.program_id(0) * num_tiles // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * num_tiles // tl.num_programs(0)
    return begin, end


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
def _load_shrink(  # noqa: PLR0913
    tile, live, pool, records, first_unit, num_units, IN: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """A [16, BLOCK_K] of a tile, its record, slice and split; the slices come one by one."""
    SPLITS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    index = tile // SPLITS
    split = tile % SPLITS
    slice_index = tl.where(index >= num_units, 1, 0) + tl.where(index >= 2 * num_units, 1, 0)
    unit = first_unit + index - slice_index * num_units
    record = records + (unit * 8 + slice_index) * 8
    address = load_word(record, live)
    shape = load_word(record + 2, live)
    row_start = load_word(record + 3, live)
    h_start = load_word(record + 4, live)
    a = load_group(pool, address, shape & 255, split * BLOCK_K, IN, BLOCK_K)
    return a, shape, row_start, h_start, slice_index, split


@triton.jit
def _shrink_row(a, x, first, partials, IN: tl.constexpr, BLOCK_K: tl.constexpr):
    column = first + tl.arange(0, BLOCK_K)
    values = tl.load(x + column, mask=column < IN, other=0.0).to(tl.float32)
    sums = tl.sum(a.to(tl.float32) * values[None, :], axis=1)
    tl.store(partials + tl.arange(0, 16), sums)


@triton.jit
def _shrink_tile(  # noqa: PLR0913
    a, num_rows, x, x_stride, first, partials, IN: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr, H_STRIDE: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, TILE_M)[:, None]
    column = first + tl.arange(0, BLOCK_K)[None, :]
    mask = (row < num_rows) & (column < IN)
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0)
    sums = tl.dot(values, tl.trans(a), input_precision="ieee")
    out = partials + row * H_STRIDE + tl.arange(0, 16)[None, :]
    tl.store(out, sums, mask=row < num_rows)


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
    BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    SPLITS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    is_used = is_site_used(work, record_start, num_slices)
    row_units = load_word(work + 1) * is_used
    run_units = load_word(work + 3) * is_used
    records += record_start
    # A share of each: a tile of several rows takes longer.
    row_begin, row_end = share(num_slices * row_units * SPLITS)
    run_begin, run_end = share(num_slices * run_units * SPLITS)
    num_row_tiles = row_end - row_begin
    num_tiles = num_row_tiles + run_end - run_begin
    a = tl.zeros((16, BLOCK_K), pool.dtype.element_ty)
    zero = row_begin * 0
    shape, row_start, h_start, slice_index, split = zero, zero, zero, zero, zero
    # A turn computes a tile and loads the weights of the next; the first turn only loads.
    for turn in range(-1, num_tiles):
        if turn >= 0:
            rows = x + row_start.to(tl.int64) * x_stride
            out = partials + h_start.to(tl.int64) * H_STRIDE
            out += (slice_index * MAX_SPLITS + split) * 16
            if (shape >> 16) == 1:
                _shrink_row(a, rows, split * BLOCK_K, out, IN, BLOCK_K)
            else:
                _shrink_tile(
                    a, shape >> 16, rows, x_stride, split * BLOCK_K, out,
                    IN, BLOCK_K, TILE_M, H_STRIDE,
                )  # fmt: skip
        is_row = turn + 1 < num_row_tiles
        a, shape, row_start, h_start, slice_index, split = _load_shrink(
            turn + 1 + tl.where(is_row, row_begin, run_begin - num_row_tiles),
            turn + 1 < num_tiles,
            pool,
            records,
            tl.where(is_row, 0, row_units),
            tl.where(is_row, row_units, run_units),
            IN,
            BLOCK_K,
        )
        if PDL:  # noqa: SIM102 - known when compiling
            if turn < 0:
                tl.extra.cuda.gdc_wait()


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
    BLOCK_K: tl.constexpr,
    STEP_K: tl.constexpr,
    TILE_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """All slices of a unit together, so that x is read once; for prompts."""
    SPLITS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    begin, end = share(tl.load(work + 3) * is_site_used(work, record_start, num_slices) * SPLITS)
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
        first = split * BLOCK_K
        sums = tl.zeros((TILE_M, RANKS), tl.float32)
        for start in range(first, tl.minimum(first + BLOCK_K, IN), STEP_K):
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
