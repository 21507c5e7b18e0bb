"""y += h @ B of every head of a step's work list."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.lora_records_triton import is_site_used, load_group, load_word


@triton.jit
def _tile_of_turn(turn):
    """This program's tile in a turn. The long ones come first in the list and programs change
    ends from turn to turn, so that each gets about the same in all."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


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
def _load_unit(record, live=True):
    """B's address, ranks, h and weight of a unit."""
    ranks = load_word(record + 2, live) & 255
    weight = load_word(record + 5, live).to(tl.float32, bitcast=True)
    return load_word(record + 1, live), ranks, load_word(record + 4, live), weight


@triton.jit
def _h_of_row(  # noqa: PLR0913
    partials, at, weight, ranks, dtype, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """weight * h [16] of one row, rounded as the matrix units do it: a row alone and a row in a
    tile get the same."""
    rank = tl.arange(0, 16)
    h = partials + at.to(tl.int64) * (3 * MAX_SPLITS * 16)
    if SPLITS == 1:
        sums = tl.load(h + rank, mask=rank < ranks, other=0.0)
    else:
        split = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None]
        mask = (split < SPLITS) & (rank < ranks)[None, :]
        sums = tl.sum(tl.load(h + split * 16 + rank[None, :], mask=mask, other=0.0), 0)
    return (sums * weight).to(dtype).to(tl.float32)


@triton.jit
def _h_of_tile(  # noqa: PLR0913
    partials, at, ranks, num_rows, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """h [TILE_M, 16] of a tile of rows."""
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    row = tl.arange(0, TILE_M)[:, None]
    rank = tl.arange(0, 16)[None, :]
    h = partials + at.to(tl.int64) * H_STRIDE + row * H_STRIDE + rank
    # A mask that is one for all ranks of a row: several are read at once. What no shrink has
    # written may be no number.
    mask = row < tl.where(ranks > 0, num_rows, 0)
    sums = tl.load(h, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(h + split * 16, mask=mask, other=0.0)
    return tl.where(rank < ranks, sums, 0.0)


@triton.jit
def _add_few(  # noqa: PLR0913
    b, unit, record, records, pool, partials, y, y_stride, num_rows, first, width,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Up to ROWS rows of one head: y += h @ b, and what follows the head.

    records, partials, y: at the slice; y at the head's first row   b, unit: of the head
    """
    column = first + tl.arange(0, N)
    _, ranks, at, weight = unit
    more = load_word(record + 6)
    num_more = load_word(record + 7)
    # Nothing, where the adapter leaves this layer alone.
    written = tl.where(ranks + num_more > 0, width, 0)
    values = ()
    for row in tl.static_range(ROWS):
        inside = column < tl.where(row < num_rows, written, 0)
        value = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        live_ranks = tl.where(row < num_rows, ranks, 0)
        h = _h_of_row(partials, at + row, weight, live_ranks, b.dtype, MAX_SPLITS, SPLITS)
        value += tl.sum(b.to(tl.float32) * h[:, None], axis=0)
        values = values + (value,)  # type: ignore[assignment]
    for index in tl.range(num_more, num_stages=1):
        address, ranks, at, weight = _load_unit(records + (more + index) * 64)
        more_b = load_group(pool, address, ranks, first, width, N)
        added = ()
        for row in tl.static_range(ROWS):
            live_ranks = tl.where(row < num_rows, ranks, 0)
            h = _h_of_row(partials, at + row, weight, live_ranks, b.dtype, MAX_SPLITS, SPLITS)
            more_sum = tl.sum(more_b.to(tl.float32) * h[:, None], axis=0)
            added = added + (values[row] + more_sum,)  # type: ignore[assignment]
        values = added
    for row in tl.static_range(ROWS):
        inside = column < tl.where(row < num_rows, written, 0)
        tl.store(y + row * y_stride + column, values[row].to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load_head(  # noqa: PLR0913
    tile, num_tiles, pool, records, width0, width1, width2, N: tl.constexpr
):  # fmt: skip
    """B [16, N] of a tile, its unit, its record, rows, and where it is."""
    head, slice_index, first, out_start, width = _locate(tile, width0, width1, width2, N)
    record = records + (head * 8 + slice_index) * 8
    live = tile < num_tiles
    unit = _load_unit(record, live)
    num_rows = load_word(record + 2, live) >> 16
    row_start = load_word(record + 3, live)
    b = load_group(pool, unit[0], unit[1], first, width, N)
    return b, unit, record, num_rows, row_start, slice_index, first, out_start, width


@triton.jit
def _expand_few(  # noqa: PLR0913
    loaded, pool, records, partials, y, y_stride,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    b, unit, record, num_rows, row_start, slice_index, first, out_start, width = loaded
    of_slice = records + slice_index * 8
    h = partials + slice_index * (MAX_SPLITS * 16)
    rows = y + row_start.to(tl.int64) * y_stride + out_start
    if num_rows == 1:
        _add_few(
            b, unit, record, of_slice, pool, h, rows, y_stride, 1, first, width,
            N, 1, MAX_SPLITS, SPLITS,
        )  # fmt: skip
    elif num_rows > 1:
        _add_few(
            b, unit, record, of_slice, pool, h, rows, y_stride, num_rows, first, width,
            N, ROWS, MAX_SPLITS, SPLITS,
        )  # fmt: skip


@triton.jit
def _expand_tile(  # noqa: PLR0913
    tile, pool, records, of_heads, partials, y, y_stride, width0, width1, width2,
    N: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Rows by matrix units. of_heads: records of the first tile"""
    b, unit, record, num_rows, row_start, slice_index, first, out_start, width = _load_head(
        tile, tile + 1, pool, of_heads, width0, width1, width2, N
    )
    more = load_word(record + 6)
    num_more = load_word(record + 7)
    _, ranks, at, weight = unit
    row = tl.arange(0, TILE_M)[:, None]
    column = first + tl.arange(0, N)[None, :]
    target = y + row_start.to(tl.int64) * y_stride + out_start + row * y_stride + column
    mask = (row < num_rows) & (column < tl.where(ranks + num_more > 0, width, 0))
    values = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    of_slice = partials + slice_index * (MAX_SPLITS * 16)
    h = _h_of_tile(of_slice, at, ranks, num_rows, TILE_M, MAX_SPLITS, SPLITS) * weight
    values = tl.dot(h.to(b.dtype), b, values, input_precision="ieee")
    for index in tl.range(num_more, num_stages=1):
        address, ranks, at, weight = _load_unit(records + (more + index) * 64 + slice_index * 8)
        more_b = load_group(pool, address, ranks, first, width, N)
        h = _h_of_tile(of_slice, at, ranks, num_rows, TILE_M, MAX_SPLITS, SPLITS) * weight
        values = tl.dot(h.to(b.dtype), more_b, values, input_precision="ieee")
    tl.store(target, values.to(y.dtype.element_ty), mask=mask)


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
    TILE_M: tl.constexpr,
    ROW_N: tl.constexpr,
    TILE_N: tl.constexpr,
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
    num_tiles = row_heads * _num_chunks(width0, width1, width2, ROW_N)
    programs = tl.num_programs(0)
    # At least one turn, for whoever has nothing to do must wait as well.
    for turn in tl.range(tl.maximum(tl.cdiv(num_tiles, programs), 1), num_stages=1):
        tile = _tile_of_turn(turn)
        loaded = _load_head(tile, num_tiles, pool, records, width0, width1, width2, ROW_N)
        if PDL:  # noqa: SIM102 - known when compiling
            if turn == 0:
                tl.extra.cuda.gdc_wait()
        _expand_few(
            loaded, pool, records, partials, y, y_stride, ROW_N, ROWS, MAX_SPLITS, ROW_SPLITS
        )
    # From the other end: the last programs have had the fewest tiles of few rows.
    num_tiles = tile_heads * _num_chunks(width0, width1, width2, TILE_N)
    for tile in tl.range(programs - 1 - tl.program_id(0), num_tiles, programs, num_stages=1):
        _expand_tile(
            tile, pool, records, records + row_units * 64, partials, y, y_stride,
            width0, width1, width2, TILE_N, TILE_M, MAX_SPLITS, TILE_SPLITS,
        )  # fmt: skip
