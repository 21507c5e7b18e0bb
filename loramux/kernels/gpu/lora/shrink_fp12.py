"""x @ A of a unit whose A is in twelve bits, by matrix units: for single rows, too.

Its four warps take a quarter of the columns each, or a slice of the site each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.fp12 import FP12_SCALE, load_planes, unpack_fp12
from loramux.kernels.gpu.lora.work_item import find_few, load_word, skip
from loramux.kernels.gpu.pdl import JOINED_IN_FOURS, LANES_FIRST, axis

MOST_FEW_ROWS = 8
"""Of a unit of few rows: as many as the smallest matrix product has; copies of fewer fill it up."""
_MOST_ROWS: tl.constexpr = tl.constexpr(MOST_FEW_ROWS)
_WARPS: tl.constexpr = tl.constexpr(4)


@triton.jit
def _words(pool, address):
    """An address in the pool as one of words."""
    return pool.to(tl.pointer_type(tl.int32), bitcast=True) + address.to(tl.int64) * 32


@triton.jit
def _named(x, LINES: tl.constexpr, K: tl.constexpr):
    """[LINES, K], the columns named as lanes have them: four side by side, or two and two."""
    if not JOINED_IN_FOURS:
        x = tl.permute(tl.reshape(x, (LINES, K // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (LINES, K))


@triton.jit
def _lengthened(planes, OCTETS: tl.constexpr, BLOCKS: tl.constexpr, COMPILED: tl.constexpr):
    """[_WARPS, OCTETS * 8, BLOCKS * 128], columns by their names"""
    weights = unpack_fp12(planes, _WARPS, OCTETS, BLOCKS, COMPILED)
    weights = tl.reshape(weights, (_WARPS * OCTETS * 8, BLOCKS * 128))
    weights = _named(weights, _WARPS * OCTETS * 8, BLOCKS * 128)
    return tl.reshape(weights, (_WARPS, OCTETS * 8, BLOCKS * 128))


@triton.jit
def load_few_short(  # noqa: PLR0913
    tile, num_tiles, pool, records, num_units, gap,
    IN: tl.constexpr, SLICES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A's words (warps, 2 octets, blocks, 128) of a tile of few rows, its record, slice, split."""
    split, slice_index, address, shape, row_start, h_start = find_few(
        tile, num_tiles, records, num_units, gap, SLICES
    )
    ranks = shape & 255
    warp = axis(_WARPS, 0, 4, LANES_FIRST)
    octet = axis(2, 1, 4, LANES_FIRST)
    column = split * K + warp * (K // _WARPS) + axis(128, 3, 4, LANES_FIRST)
    column += axis(K // (128 * _WARPS), 2, 4, LANES_FIRST) * 128
    mask = octet * 8 < ranks
    if IN % K != 0:
        mask = mask & (column < IN)
    planes = load_planes(_words(pool, address) + octet * (3 * IN) + column, IN, mask, "evict_first")
    # Nothing to do where the adapter leaves this layer alone.
    num_rows = tl.where(ranks > 0, shape >> 16, 0)
    return planes, num_rows, row_start, h_start, slice_index, split


@triton.jit
def sum_few_short(  # noqa: PLR0913
    loaded, x, x_stride, partials, IN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Up to ROWS rows, a power of two; where there are fewer, the last one again."""
    planes, num_rows, row_start, h_start, slice_index, split = loaded
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    COLUMNS: tl.constexpr = K // _WARPS
    if num_rows > 0:
        row = tl.minimum(tl.arange(0, ROWS), num_rows - 1)[:, None]
        column = split * K + tl.arange(0, K)[None, :]
        at = x + row_start.to(tl.int64) * x_stride + row * x_stride + column
        values = tl.load(at) if IN % K == 0 else tl.load(at, mask=column < IN, other=0.0)
        if not COMPILED:
            values = values.to(tl.float32)
        values = _named(values, ROWS, K)
        values = tl.permute(tl.reshape(values, (ROWS, _WARPS, COLUMNS)), (1, 2, 0))
        values = tl.reshape(values, (_WARPS, COLUMNS, 1, ROWS))
        values = tl.broadcast_to(values, (_WARPS, COLUMNS, _MOST_ROWS // ROWS, ROWS))
        values = tl.reshape(values, (_WARPS, COLUMNS, _MOST_ROWS))
        weights = _lengthened(planes, 2, COLUMNS // 128, COMPILED)
        sums = tl.sum(tl.dot(weights, values, input_precision="ieee"), 0) * FP12_SCALE
        row = tl.arange(0, _MOST_ROWS)[None, :]
        out = partials + h_start.to(tl.int64) * H_STRIDE
        out += (slice_index * MAX_SPLITS + split) * 16 + tl.arange(0, 16)[:, None]
        tl.store(out + row * H_STRIDE, sums, mask=row < num_rows)


@triton.jit
def sum_tile_short(  # noqa: PLR0913
    tile, pool, records, gap, x, x_stride, partials, IN: tl.constexpr, SLICES: tl.constexpr,
    TILE_K: tl.constexpr, TILE_M: tl.constexpr, MAX_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One group of ranks of every slice for a tile of rows, so that x is read once."""
    SPLITS: tl.constexpr = (IN + TILE_K - 1) // TILE_K
    H_STRIDE: tl.constexpr = 3 * MAX_SPLITS * 16
    # A warp has a slice; where there are too few of them, all have all slices, and columns differ.
    BY_SLICE: tl.constexpr = SLICES > 2
    LINES: tl.constexpr = triton.next_power_of_2(SLICES)
    OCTETS: tl.constexpr = 2 if BY_SLICE else 2 * LINES
    STEP: tl.constexpr = 128 if BY_SLICE else 128 * _WARPS
    unit = tile // SPLITS
    split = tile - unit * SPLITS
    record = records + skip(unit, gap) * 64
    warp = axis(_WARPS, 0, 4, LANES_FIRST)
    octet = axis(OCTETS, 1, 4, LANES_FIRST)
    slice_index = warp + octet // 2 if BY_SLICE else warp * 0 + octet // 2
    part = warp * 0 if BY_SLICE else warp
    is_slice = slice_index < SLICES
    address = load_word(record + slice_index * 8, is_slice)
    ranks = load_word(record + slice_index * 8 + 2, is_slice) & 255
    words = _words(pool, address) + octet % 2 * (3 * IN)
    num_rows = load_word(record + 2) >> 16
    rows = x + load_word(record + 3).to(tl.int64) * x_stride
    row = tl.arange(0, TILE_M)[:, None]
    sums = tl.zeros((_WARPS, OCTETS * 8, TILE_M), tl.float32)
    first = split * TILE_K
    # Where a step has all of the columns there is nothing to read ahead.
    DEPTH: tl.constexpr = STAGES if BY_SLICE else 1
    for start in tl.range(first, tl.minimum(first + TILE_K, IN), STEP, num_stages=DEPTH):
        column = start + tl.arange(0, STEP)[None, :]
        values = tl.load(
            rows + row * x_stride + column, mask=(row < num_rows) & (column < IN), other=0.0
        )
        if not COMPILED:
            values = values.to(tl.float32)
        word = start + part * 128 + axis(128, 3, 4, LANES_FIRST)
        mask = (octet % 2 * 8 < ranks) & (word < IN)
        weights = _lengthened(load_planes(words + word, IN, mask, ""), OCTETS, 1, COMPILED)
        values = _named(values, TILE_M, STEP)
        if BY_SLICE:
            values = tl.broadcast_to(tl.trans(values)[None, :, :], (_WARPS, 128, TILE_M))
        else:
            values = tl.permute(tl.reshape(values, (TILE_M, _WARPS, 128)), (1, 2, 0))
        sums = tl.dot(weights, values, sums, input_precision="ieee")
    total = tl.reshape(sums, (_WARPS * 16, TILE_M)) if BY_SLICE else tl.sum(sums, 0)
    line = tl.arange(0, 16 * LINES)[:, None]
    row = tl.arange(0, TILE_M)[None, :]
    out = partials + load_word(record + 4).to(tl.int64) * H_STRIDE + split * 16
    out += row * H_STRIDE + line // 16 * (MAX_SPLITS * 16) + line % 16
    tl.store(out, total * FP12_SCALE, mask=(row < num_rows) & (line // 16 < SLICES))
