"""y += h @ B of every head of a step's work list."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.lora_shrink_triton import is_site_used, load_group, load_word


@triton.jit
def _tile_of_turn(turn):
    """This program's tile in a turn. The long ones come first in the list and programs change
    ends from turn to turn, so that each gets about the same in all."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


@triton.jit
def _num_turns(num_tiles):
    return tl.cdiv(num_tiles, tl.num_programs(0))


@triton.jit
def _h_of_row(h, splits, MAX_SPLITS: tl.constexpr):
    """h [16] of one row: the sum of its splits."""
    rank = tl.arange(0, 16)[None, :]
    split = tl.arange(0, MAX_SPLITS)[:, None]
    return tl.sum(tl.load(h + split * 16 + rank, mask=split < splits, other=0.0), 0)


@triton.jit
def _h_of_tile(h, h_stride, num_rows, splits, TILE_M: tl.constexpr):
    """h [TILE_M, 16] of a tile of rows."""
    row = tl.arange(0, TILE_M)[:, None]
    source = h + row * h_stride + tl.arange(0, 16)[None, :]
    sums = tl.zeros((TILE_M, 16), tl.float32)
    for first in tl.range(0, splits, 16, num_stages=1):
        for split in tl.static_range(16):
            mask = row < tl.where(first + split < splits, num_rows, 0)
            sums += tl.load(source + (first + split) * 16, mask=mask, other=0.0)
    return sums


@triton.jit
def _load_more(records, unit):
    """B's address, ranks, h and weight of a unit that follows a head."""
    record = records + unit * 64
    ranks = load_word(record + 2) & 255
    weight = load_word(record + 5).to(tl.float32, bitcast=True)
    return load_word(record + 1), ranks, load_word(record + 4), weight


@triton.jit
def _locate(  # noqa: PLR0913
    tile, heads_of_row, num_row_units, width0, width1, width2,
    ROW_N: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Whether it is a row, unit, slice, first column in the slice, and the slice's width."""
    row_chunks = tl.cdiv(width0, ROW_N) + tl.cdiv(width1, ROW_N) + tl.cdiv(width2, ROW_N)
    run_chunks = tl.cdiv(width0, TILE_N) + tl.cdiv(width1, TILE_N) + tl.cdiv(width2, TILE_N)
    is_row = tile < heads_of_row * row_chunks
    block = tl.where(is_row, ROW_N, TILE_N)
    chunks = tl.where(is_row, row_chunks, run_chunks)
    rest = tile - tl.where(is_row, 0, heads_of_row * row_chunks)
    head = rest // chunks
    first = (rest - head * chunks) * block
    covered0 = tl.cdiv(width0, block) * block
    covered1 = tl.cdiv(width1, block) * block
    is_past0 = first >= covered0
    is_past1 = first >= covered0 + covered1
    first -= tl.where(is_past0, covered0, 0) + tl.where(is_past1, covered1, 0)
    width = tl.where(is_past1, width2, tl.where(is_past0, width1, width0))
    slice_index = tl.where(is_past0, 1, 0) + tl.where(is_past1, 1, 0)
    unit = head + tl.where(is_row, 0, num_row_units)
    return is_row, unit, slice_index, first, width


@triton.jit
def _load_expand(  # noqa: PLR0913
    tile, live, pool, records, heads_of_row, num_row_units,
    width0, width1, width2, ROW_N: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """A tile's B, as [16, ROW_N] for one row or [16, TILE_N] for several, and its record."""
    is_row, unit, slice_index, first, width = _locate(
        tile, heads_of_row, num_row_units, width0, width1, width2, ROW_N, TILE_N
    )
    record = records + (unit * 8 + slice_index) * 8
    address = load_word(record + 1, live)
    shape = load_word(record + 2, live)
    row_start = load_word(record + 3, live)
    at = load_word(record + 4, live)
    weight = load_word(record + 5, live).to(tl.float32, bitcast=True)
    more = load_word(record + 6, live)
    num_more = load_word(record + 7, live)
    ranks = shape & 255
    b_row = load_group(pool, address, tl.where(is_row, ranks, 0), first, width, ROW_N)
    b_tile = load_group(pool, address, tl.where(is_row, 0, ranks), first, width, TILE_N)
    return (
        is_row, b_row, b_tile, shape, row_start, at, weight, more, num_more,
        slice_index, first, width,
    )  # fmt: skip


@triton.jit
def _expand_row(  # noqa: PLR0913
    b, h, h_stride, y, at, weight, splits, pool, records, more, num_more, first, width, written,
    MAX_SPLITS: tl.constexpr, ROW_N: tl.constexpr,
):  # fmt: skip
    column = first + tl.arange(0, ROW_N)
    values = tl.load(y + column, mask=column < written, other=0.0).to(tl.float32)
    sums = _h_of_row(h + at.to(tl.int64) * h_stride, splits, MAX_SPLITS) * weight
    # Rounded as the matrix units do it: a row alone and a row in a tile get the same h.
    values += tl.sum(b.to(tl.float32) * sums.to(b.dtype).to(tl.float32)[:, None], axis=0)
    for index in tl.range(num_more, num_stages=1):
        address, ranks, more_at, more_weight = _load_more(records, more + index)
        more_b = load_group(pool, address, ranks, first, width, ROW_N)
        sums = _h_of_row(h + more_at.to(tl.int64) * h_stride, splits, MAX_SPLITS) * more_weight
        values += tl.sum(more_b.to(tl.float32) * sums.to(b.dtype).to(tl.float32)[:, None], axis=0)
    tl.store(y + column, values.to(y.dtype.element_ty), mask=column < written)


@triton.jit
def _expand_tile(  # noqa: PLR0913
    b, h, h_stride, y, y_stride, at, weight, num_rows, splits, pool, records, more,
    num_more, first, width, written, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, TILE_M)[:, None]
    column = first + tl.arange(0, TILE_N)[None, :]
    target = y + row * y_stride + column
    mask = (row < num_rows) & (column < written)
    values = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    sums = _h_of_tile(h + at.to(tl.int64) * h_stride, h_stride, num_rows, splits, TILE_M)
    values = tl.dot((sums * weight).to(b.dtype), b, values, input_precision="ieee")
    for index in tl.range(num_more, num_stages=1):
        address, ranks, more_at, more_weight = _load_more(records, more + index)
        more_b = load_group(pool, address, ranks, first, width, TILE_N)
        more_h = h + more_at.to(tl.int64) * h_stride
        sums = _h_of_tile(more_h, h_stride, num_rows, splits, TILE_M) * more_weight
        values = tl.dot(sums.to(b.dtype), more_b, values, input_precision="ieee")
    tl.store(target, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _expand(  # noqa: PLR0913
    is_row, b_row, b_tile, shape, row_start, at, weight, more, num_more, slice_index,
    first, width, pool, records, partials, y, y_stride, width0, width1, width2,
    splits, MAX_SPLITS: tl.constexpr, TILE_M: tl.constexpr,
    ROW_N: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    out_start = tl.where(slice_index > 0, width0, 0) + tl.where(slice_index > 1, width1, 0)
    rows = y + row_start.to(tl.int64) * y_stride
    h = partials + slice_index * (MAX_SPLITS * 16)
    h_stride = 3 * MAX_SPLITS * 16
    # Nothing, where the adapter leaves this layer alone.
    written = tl.where((shape & 255) + num_more > 0, width, 0)
    of_slice = records + slice_index * 8
    if is_row:
        _expand_row(
            b_row, h, h_stride, rows + out_start, at, weight, splits, pool, of_slice, more,
            num_more, first, width, written, MAX_SPLITS, ROW_N,
        )  # fmt: skip
    else:
        _expand_tile(
            b_tile, h, h_stride, rows + out_start, y_stride, at, weight, shape >> 16,
            splits, pool, of_slice, more, num_more, first, width, written,
            TILE_M, TILE_N,
        )  # fmt: skip


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
    splits,
    MAX_SPLITS: tl.constexpr,
    TILE_M: tl.constexpr,
    ROW_N: tl.constexpr,
    TILE_N: tl.constexpr,
    LOOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Without LOOP there are as many programs as tiles, or more."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    heads_of_row = load_word(work)
    num_row_units = load_word(work + 1)
    heads_of_tile = load_word(work + 2)
    row_chunks = tl.cdiv(width0, ROW_N) + tl.cdiv(width1, ROW_N) + tl.cdiv(width2, ROW_N)
    tile_chunks = tl.cdiv(width0, TILE_N) + tl.cdiv(width1, TILE_N) + tl.cdiv(width2, TILE_N)
    num_slices = 1 + (width1 > 0).to(tl.int32) + (width2 > 0).to(tl.int32)
    num_tiles = heads_of_row * row_chunks + heads_of_tile * tile_chunks
    num_tiles *= is_site_used(work, record_start, num_slices)
    records += record_start
    if LOOP:
        zero = num_tiles * 0
        is_row = num_tiles < 0
        b_row = tl.zeros((16, ROW_N), pool.dtype.element_ty)
        b_tile = tl.zeros((16, TILE_N), pool.dtype.element_ty)
        shape, row_start, at, weight = zero, zero, zero, zero.to(tl.float32)
        more, num_more, slice_index, first, width = zero, zero, zero, zero, zero
        # A turn computes a tile and loads the weights of the next; the first turn only loads.
        for turn in range(-1, _num_turns(num_tiles)):
            if turn >= 0:
                _expand(
                    is_row, b_row, b_tile, shape, row_start, at, weight, more, num_more,
                    slice_index, first, width, pool, records, partials, y, y_stride,
                    width0, width1, width2, splits,
                    MAX_SPLITS, TILE_M, ROW_N, TILE_N,
                )  # fmt: skip
            tile = _tile_of_turn(turn + 1)
            (
                is_row, b_row, b_tile, shape, row_start, at, weight, more, num_more, slice_index,
                first, width,
            ) = _load_expand(
                tile, tile < num_tiles, pool, records, heads_of_row, num_row_units,
                width0, width1, width2, ROW_N, TILE_N,
            )  # fmt: skip
            if PDL:  # noqa: SIM102 - known when compiling
                if turn < 0:
                    tl.extra.cuda.gdc_wait()
    else:
        tile = tl.program_id(0)
        (
            is_row, b_row, b_tile, shape, row_start, at, weight, more, num_more, slice_index,
            first, width,
        ) = _load_expand(
            tile, tile < num_tiles, pool, records, heads_of_row, num_row_units,
            width0, width1, width2, ROW_N, TILE_N,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
        if tile < num_tiles:
            _expand(
                is_row, b_row, b_tile, shape, row_start, at, weight, more, num_more, slice_index,
                first, width, pool, records, partials, y, y_stride, width0, width1, width2,
                splits, MAX_SPLITS, TILE_M, ROW_N, TILE_N,
            )  # fmt: skip
