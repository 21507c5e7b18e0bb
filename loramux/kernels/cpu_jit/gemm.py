"""Compiled GEMM (float32): x @ weight.T + bias over weights that were packed once into panels.

A panel is as wide as a register tile and stored in the order in which the tile's loop reads it.
Each panel belongs to one thread, and a row's result does not depend on the other rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.cpu_jit.runtime import (
    LONG_BYTES,
    OPTIONS,
    add_done,
    floats_at,
    take_next,
    wait_for,
)
from loramux.kernels.cpu_jit.tiles import (
    FLOAT_BYTES,
    ROWS,
    SHAPE,
    UNROLL,
    WIDTH,
    packed_tile,
    rows_at,
)
from loramux.kernels.ops import PackedMatrix

# Rows of x that stay in the L2 cache while all panels are read.
_BLOCK_ROWS = 256
# Pieces of the panels per thread; the last ones are taken one by one.
_PIECES = 4
# Byte offsets of the counters of a GEMM and of its epilogue, then one per block of rows.
_TAKEN_PACKS, _DONE_PACKS, _DONE_PANELS = 0, 64, 128
TAKEN_RUNS, DONE_RUNS, TAKEN_ROWS = 192, 256, 320
_NUM_COUNTERS = 48


def pack(weight: Tensor, bias: Tensor | None) -> PackedMatrix:
    """weight [out, in], bias [out]"""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // WIDTH)
    padded = torch.zeros(num_panels * WIDTH, in_features)
    padded[:out_features] = weight
    start = torch.zeros(num_panels * WIDTH)
    if bias is not None:
        start[:out_features] = bias
    panels, at = torch.empty(padded.numel()), 0
    depth = part_depth(in_features)
    for k in range(0, in_features, depth):
        part = padded[:, k : k + depth]
        target = panels[at : at + part.numel()].view(num_panels, part.shape[1], WIDTH)
        target.copy_(part.reshape(num_panels, WIDTH, -1).transpose(1, 2))
        at += part.numel()
    return PackedMatrix(in_features, out_features, depth, panels.numpy(), start.numpy())


def part_depth(in_features: int) -> int:
    """Depth of a block of K: all blocks but the last are equal."""
    num_parts = max(1, -(-in_features // SHAPE.max_depth))
    return max(1, -(-in_features // num_parts))


def multiply(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x [rows, in] -> [rows, out]"""
    y = np.empty((x.shape[0], matrix.out_features), dtype=np.float32)
    multiply_into(x.contiguous().numpy(), matrix, y)
    return torch.from_numpy(y)


def multiply_into(x: NDArray[np.float32], matrix: PackedMatrix, y: NDArray[np.float32]) -> None:
    """x and y are contiguous."""
    scratch, counters = scratch_of(len(x), matrix)
    plan = matrix.depth, torch.get_num_threads()
    _multiply(x, matrix.panels, matrix.start, y, scratch, counters, plan)


def scratch_of(
    num_rows: int, matrix: PackedMatrix
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scratch for packed x and for the columns of y past its last whole panel, and counters."""
    num_rest = num_rows * WIDTH if matrix.out_features % WIDTH else 0
    scratch = np.empty(num_rows * matrix.in_features + num_rest, dtype=np.float32)
    return scratch, np.zeros(_NUM_COUNTERS + -(-num_rows // _BLOCK_ROWS), dtype=np.int64)


@njit("void(float32[:, ::1], int64, int64, float32[::1])", **OPTIONS)
def _pack_eight(x, row, k, out):
    count = out.size // 8
    x0, x1, x2, x3 = x[row, k:], x[row + 1, k:], x[row + 2, k:], x[row + 3, k:]
    x4, x5, x6, x7 = x[row + 4, k:], x[row + 5, k:], x[row + 6, k:], x[row + 7, k:]
    for i in range(count):
        at = i * 8
        out[at], out[at + 1], out[at + 2], out[at + 3] = x0[i], x1[i], x2[i], x3[i]
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = x4[i], x5[i], x6[i], x7[i]


@njit("void(float32[:, ::1], int64, int64, int64, float32[::1])", **OPTIONS)
def _pack_tile(x, row, num_rows, depth, packed):
    """Rows row.. of x, columns first, in each part of the inner dimension: [depth, num_rows]."""
    total_rows, size = x.shape
    for k in range(0, size, depth):
        count = min(depth, size - k)
        out = packed[k * total_rows + row * count :][: num_rows * count]
        if num_rows == 8:
            _pack_eight(x, row, k, out)
            continue
        for i in range(num_rows):
            for j in range(count):
                out[j * num_rows + i] = x[row + i, k + j]


@njit("void(UniTuple(int64, 6), UniTuple(int64, 5))", **OPTIONS)
def _take_packs(addresses, sizes):
    """Packs tiles of x, one by one, then waits for those that other threads have begun."""
    x, packed, counters = addresses[0], addresses[1], addresses[5]
    size, depth, total_rows, _, _ = sizes
    rows = floats_at(x, (total_rows, size))
    out = floats_at(packed, total_rows * size)
    full = total_rows // ROWS
    num_items = full + (1 if total_rows % ROWS else 0)
    number = take_next(counters + _TAKEN_PACKS)
    while number < num_items:
        row = number * ROWS
        stop = min(row + ROWS, total_rows)
        while row < stop:
            num_rows = rows_at(row, stop)
            _pack_tile(rows, row, num_rows, depth, out)
            row += num_rows
        add_done(counters + _DONE_PACKS, 1)
        number = take_next(counters + _TAKEN_PACKS)
    wait_for(counters + _DONE_PACKS, num_items)


@njit("void(UniTuple(int64, 5), UniTuple(int64, 2), UniTuple(int64, 3))", **OPTIONS)
def _panel_part(addresses, rows, part):
    """Return the rows from rows[0] to rows[1] of one panel's columns, over one part of the inner
    size.
    """
    x, panel, first, y, y_stride = addresses
    row, stop = rows
    k, depth, total_rows = part
    x += k * total_rows * FLOAT_BYTES
    # A piece of the panel behind this one with each tile.
    step = max(1, UNROLL * WIDTH * FLOAT_BYTES * ROWS // (stop - row))
    ahead = panel + depth * WIDTH * FLOAT_BYTES
    while row < stop:
        num_rows = rows_at(row, stop)
        target = y + row * y_stride
        begin, stride = (first, 0) if k == 0 else (target, y_stride)
        x_at = x + row * depth * FLOAT_BYTES
        packed_tile(num_rows, (x_at, panel, begin, stride, target, y_stride, depth, ahead, step))
        ahead += depth // UNROLL * step
        row += num_rows


@njit("void(UniTuple(int64, 6), UniTuple(int64, 4), UniTuple(int64, 5))", **OPTIONS)
def _panels(addresses, rows, sizes):
    """Panels from `begin` to `end`; one that is wider than the rest of y goes through scratch."""
    _, x, panels, start, y, _ = addresses
    row, stop, begin, end = rows
    size, depth, total_rows, num_columns, width = sizes
    scratch, rest = x + total_rows * size * FLOAT_BYTES, num_columns % WIDTH
    for k in range(0, size, depth):
        count = min(depth, size - k)
        for number in range(begin, end):
            panel = panels + (k * width + number * WIDTH * count) * FLOAT_BYTES
            first = start + number * WIDTH * FLOAT_BYTES
            if (number + 1) * WIDTH <= num_columns:
                target, stride = y + number * WIDTH * FLOAT_BYTES, num_columns * FLOAT_BYTES
            else:
                target, stride = scratch, WIDTH * FLOAT_BYTES
            place = (x, panel, first, target, stride)
            _panel_part(place, (row, stop), (k, count, total_rows))
    if end * WIDTH > num_columns:
        for i in range(row, stop):
            target = y + ((i + 1) * num_columns - rest) * FLOAT_BYTES
            floats_at(target, rest)[:] = floats_at(scratch + i * WIDTH * FLOAT_BYTES, rest)


@njit("void(UniTuple(int64, 6), UniTuple(int64, 5), int64)", **OPTIONS)
def take_gemm(addresses, sizes, num_threads):
    """Return a thread's part of the GEMM; all of y is complete when this returns.

    addresses: x, packed, panels, start, y, counters; sizes: size, depth, total_rows, num_columns,
    width. Free threads take the next piece, so that none waits for a thread that has not started.
    """
    _take_packs(addresses, sizes)
    total_rows, num_panels = sizes[2], sizes[4] // WIDTH
    num_blocks = (total_rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    # Most panels in long pieces, the last ones one by one.
    piece = num_panels // (_PIECES * num_threads)
    num_pieces = (_PIECES - 1) * num_threads if piece else 0
    single = num_pieces * piece
    counters = addresses[5]
    for block in range(num_blocks):
        row = block * _BLOCK_ROWS
        stop = min(row + _BLOCK_ROWS, total_rows)
        counter = counters + (_NUM_COUNTERS + block) * LONG_BYTES
        number = take_next(counter)
        while number < num_pieces + num_panels - single:
            if number < num_pieces:
                begin, end = number * piece, (number + 1) * piece
            else:
                begin = single + number - num_pieces
                end = begin + 1
            _panels(addresses, (row, stop, begin, end), sizes)
            add_done(counters + _DONE_PANELS, end - begin)
            number = take_next(counter)
    wait_for(counters + _DONE_PANELS, num_blocks * num_panels)


@njit(
    "void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[::1],"
    "int64[::1], UniTuple(int64, 2))",
    parallel=True,
    **OPTIONS,
)
def _multiply(x, panels, start, y, scratch, counters, plan):
    """By addresses: two threads that count the uses of one array wait for each other."""
    data = x.ctypes.data, scratch.ctypes.data, panels.ctypes.data, start.ctypes.data
    addresses = (*data, y.ctypes.data, counters.ctypes.data)
    depth, num_threads = plan
    sizes = x.shape[1], depth, x.shape[0], y.shape[1], start.size
    for _ in prange(num_threads):
        take_gemm(addresses, sizes, num_threads)
