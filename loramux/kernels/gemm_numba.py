"""Fast on a CPU, in float32: x @ weight.T + bias over weights that were packed once into panels.

A panel is as wide as a tile: its rows lie one behind the other, as the tile's loop reads them. Each
panel is one thread's, and a row has the same bits among any others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.math_numba import OPTIONS, take_next
from loramux.kernels.tile_numba import (
    FLOAT_BYTES,
    ROWS,
    SHAPE,
    UNROLL,
    WIDTH,
    packed_tile,
    rows_at,
)

# So many rows of x stay in the second cache while all panels go by.
_BLOCK_ROWS = 256
# With more elements of x than this, all threads pack it.
_PARALLEL_ELEMENTS = 65536
# The part of the panels that is given out one by one, to whoever is there first.
_SHARED_PART = 4


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    in_features: int
    out_features: int
    depth: int
    """Of one part of the inner dimension."""
    panels: NDArray[np.float32]
    """The parts, in each the panels, in each [depth, WIDTH]; zeros behind the last column."""
    start: NDArray[np.float32]
    """What y begins with: the bias, or zeros, as wide as all panels."""


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
    """The inner dimension in equal parts, but for the last."""
    num_parts = max(1, -(-in_features // SHAPE.max_depth))
    return max(1, -(-in_features // num_parts))


def multiply(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x [rows, in] -> [rows, out]"""
    y = np.empty((x.shape[0], matrix.out_features), dtype=np.float32)
    multiply_into(x.contiguous().numpy(), matrix, y)
    return torch.from_numpy(y)


def multiply_into(x: NDArray[np.float32], matrix: PackedMatrix, y: NDArray[np.float32]) -> None:
    """Both without gaps between their rows."""
    num_rows = len(x)
    packed = np.empty(x.size, dtype=np.float32)
    tail = np.empty((num_rows if matrix.out_features % WIDTH else 0, WIDTH), dtype=np.float32)
    taken = np.zeros(-(-num_rows // _BLOCK_ROWS), dtype=np.int64)
    plan = matrix.depth, torch.get_num_threads()
    _multiply(x, matrix.panels, matrix.start, y, packed, tail, taken, plan)


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


@njit("void(float32[:, ::1], int64, float32[::1])", **OPTIONS)
def _pack_x(x, depth, packed):
    row = 0
    while row < x.shape[0]:
        num_rows = rows_at(row, x.shape[0])
        _pack_tile(x, row, num_rows, depth, packed)
        row += num_rows


@njit("void(float32[:, ::1], int64, float32[::1])", parallel=True, **OPTIONS)
def _pack_x_parallel(x, depth, packed):
    full = x.shape[0] // ROWS
    for number in prange(full):
        _pack_tile(x, number * ROWS, ROWS, depth, packed)
    row = full * ROWS
    while row < x.shape[0]:
        num_rows = rows_at(row, x.shape[0])
        _pack_tile(x, row, num_rows, depth, packed)
        row += num_rows


@njit("void(UniTuple(int64, 5), UniTuple(int64, 2), UniTuple(int64, 3))", **OPTIONS)
def _panel_part(addresses, rows, part):
    """The rows from rows[0] to rows[1] of one panel's columns, over one part of the inner size."""
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
    """Panels from `begin` to `end`; a last one that is wider than what is left of y: into tail."""
    x, panels, start, y, tail, _ = addresses
    row, stop, begin, end = rows
    size, depth, total_rows, num_columns, width = sizes
    for k in range(0, size, depth):
        count = min(depth, size - k)
        for number in range(begin, end):
            panel = panels + (k * width + number * WIDTH * count) * FLOAT_BYTES
            first = start + number * WIDTH * FLOAT_BYTES
            if (number + 1) * WIDTH <= num_columns:
                target, stride = y + number * WIDTH * FLOAT_BYTES, num_columns * FLOAT_BYTES
            else:
                target, stride = tail, WIDTH * FLOAT_BYTES
            place = (x, panel, first, target, stride)
            _panel_part(place, (row, stop), (k, count, total_rows))


@njit("void(UniTuple(int64, 6), UniTuple(int64, 5), int64)", parallel=True, **OPTIONS)
def _all_panels(addresses, sizes, num_threads):
    """By addresses: two threads that count the uses of one array wait for each other."""
    total_rows, width = sizes[2], sizes[4]
    num_panels = width // WIDTH
    own = num_panels * (_SHARED_PART - 1) // _SHARED_PART // num_threads
    num_blocks = (total_rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    for thread in prange(num_threads):
        for block in range(num_blocks):
            row = block * _BLOCK_ROWS
            stop = min(row + _BLOCK_ROWS, total_rows)
            begin, end = thread * own, (thread + 1) * own
            while begin < num_panels:
                _panels(addresses, (row, stop, begin, end), sizes)
                counter = addresses[5] + block * 8
                begin = num_threads * own + take_next(counter)
                end = begin + 1


@njit(
    "void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[::1],"
    "float32[:, ::1], int64[::1], UniTuple(int64, 2))",
    **OPTIONS,
)
def _multiply(x, panels, start, y, packed, tail, taken, plan):
    """packed, tail and taken: scratch, which the caller keeps until it is done."""
    depth, num_threads = plan
    if x.size >= _PARALLEL_ELEMENTS:
        _pack_x_parallel(x, depth, packed)
    else:
        _pack_x(x, depth, packed)
    data = packed.ctypes.data, panels.ctypes.data, start.ctypes.data, y.ctypes.data
    scratch = tail.ctypes.data, taken.ctypes.data
    sizes = x.shape[1], depth, x.shape[0], y.shape[1], start.size
    _all_panels((*data, *scratch), sizes, num_threads)
    rest = y.shape[1] % WIDTH
    if rest:
        y[:, y.shape[1] - rest :] = tail[:, :rest]
