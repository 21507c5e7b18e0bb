"""Fast on a CPU, in float32: runs of rows that read their adapter once, by loops or by tiles.

Both add a row's products in the same order, so that it has the same bits in any run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.interface import LoraRows, LoraWeights, Segment
from loramux.kernels.math_numba import OPTIONS
from loramux.kernels.tile_numba import (
    DIRECT_WIDTH,
    FLOAT_BYTES,
    MAX_ROW_WIDTH,
    direct_tile,
    multiply_add,
    row_tile,
    rows_at,
)

# Of a longer segment, so that there is work for every thread.
_RUN_ROWS = 8
_LONG_SEGMENT = 32
_LONG_RUN_ROWS = 16
# From here on by tiles: a matrix row that was loaded serves several rows of x.
_MIN_TILE_ROWS = 3
_A_ROWS = 128

COMPUTES_WHOLE_STACKS = False


def cut_rows(segments: Sequence[Segment], num_slots: int) -> LoraRows:
    rounds: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: s.start):
        _put(rounds, segment)
    return LoraRows(segments=tuple(segments), rounds=tuple(_runs(members) for members in rounds))


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, rows: LoraRows) -> None:
    """y[i] += weight(i) * x[i] @ a[slot(i)] @ b[slot(i)]; rows without an adapter are untouched."""
    storage, site = _prepared(weights)
    y_rows, x_rows = y.numpy(), x.contiguous().numpy()
    for runs, run_weights in rows.rounds:
        _add_runs(y_rows, x_rows, storage, site, runs, run_weights)


def _put(rounds: list[list[Segment]], segment: Segment) -> None:
    """Into the first round that has none of its rows; those before it begin no later."""
    for members in rounds:
        if members[-1].stop <= segment.start:
            members.append(segment)
            return
    rounds.append([segment])


def _runs(segments: Sequence[Segment]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    runs = [
        ((s.slot, start, min(start + size, s.stop)), s.weight)
        for s in segments
        for size in [_RUN_ROWS if s.stop - s.start <= _LONG_SEGMENT else _LONG_RUN_ROWS]
        for start in range(s.start, s.stop, size)
    ]
    return np.array([r for r, _ in runs], np.int64), np.array([w for _, w in runs], np.float32)


def _prepared(weights: LoraWeights) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All memory of the stack, and where the site is in it; made once.

    The table's first line is (start of a, between two adapters, total rank, 0, 0), and each other
    line a slice: (start of b, rank, out, rank_start, out_start).
    """
    if not weights.prepared:
        a = weights.a
        for piece in weights.slices:
            assert piece.b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
            assert piece.b.stride(0) == a.stride(0), "an adapter is one run of its stack"
        size = a.untyped_storage().nbytes() // a.element_size()
        lines = [(a.storage_offset(), a.stride(0), a.shape[2], 0, 0)]
        for piece in weights.slices:
            rank, out_features = piece.b.shape[1:]
            start = piece.b.storage_offset()
            lines.append((start, rank, out_features, piece.rank_start, piece.out_start))
        table = np.array(lines, dtype=np.int64)
        weights.prepared.append((a.as_strided((size,), (1,), 0).numpy(), table))
    found: tuple[NDArray[np.float32], NDArray[np.int64]] = weights.prepared[0]
    return found


@njit("void(float32[::1], float32[::1], float32[::1])", **OPTIONS)
def _add_rows(into, factors, matrix):
    """into += factors @ matrix, row after row: memory is read as fast as it comes."""
    width = into.size
    for k in range(factors.size):
        factor, row = factors[k], matrix[k * width : (k + 1) * width]
        for j in range(width):
            into[j] = multiply_add(row[j], factor, into[j])


@njit("void(float32[::1], float32[::1], float32[::1])", **OPTIONS)
def _add_narrow(into, factors, matrix):
    """The same, for a matrix of few columns: their sums stay in registers."""
    width, depth, column = into.size, factors.size, 0
    target, start, stride = into.ctypes.data, matrix.ctypes.data, width * FLOAT_BYTES
    while column < width:
        at = column * FLOAT_BYTES
        place = (factors.ctypes.data, start + at, stride, target + at, depth)
        done = row_tile(width - column, place)
        if not done:
            break
        column += done
    for j in range(column, width):
        total = into[j]
        for k in range(depth):
            total = multiply_add(matrix[k * width + j], factors[k], total)
        into[j] = total


@njit(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], UniTuple(int64, 4), UniTuple(int64, 3))",
    **OPTIONS,
)
def _add_product(y, x, matrix, place, size):
    """y[y_row :, y_column :] += x[x_row :, x_column :] @ matrix [depth, width], so many rows."""
    y_row, y_column, x_row, x_column = place
    num_rows, depth, width = size
    y_stride, x_stride = y.shape[1] * FLOAT_BYTES, x.shape[1] * FLOAT_BYTES
    y_start = y.ctypes.data + y_row * y_stride + y_column * FLOAT_BYTES
    x_start = x.ctypes.data + x_row * x_stride + x_column * FLOAT_BYTES
    whole, stride = width // DIRECT_WIDTH * DIRECT_WIDTH, width * FLOAT_BYTES
    for j in range(0, whole, DIRECT_WIDTH):
        columns, row = matrix.ctypes.data + j * FLOAT_BYTES, 0
        while row < num_rows:
            count = rows_at(row, num_rows)
            target, source = y_start + row * y_stride + j * FLOAT_BYTES, x_start + row * x_stride
            direct_tile(count, (source, x_stride, columns, stride, target, y_stride, depth))
            row += count
    if whole == width:
        return
    for i in range(num_rows):
        for k in range(depth):
            factor, values = x[x_row + i, x_column + k], matrix[k * width : (k + 1) * width]
            into = y[y_row + i, y_column : y_column + width]
            for j in range(whole, width):
                into[j] = multiply_add(values[j], factor, into[j])


@njit(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], int64[:, ::1], UniTuple(int64, 3),"
    "float32)",
    **OPTIONS,
)
def _add_tiled(y, x, storage, site, run, weight):
    slot, start, stop = run
    num_rows, size, width = stop - start, x.shape[1], site[0, 2]
    h = np.zeros((num_rows, width), dtype=np.float32)
    a = storage[site[0, 0] + slot * site[0, 1] :][: size * width]
    _add_product(h, x, a, (0, 0, start, 0), (num_rows, size, width))
    h *= weight
    for piece in range(1, len(site)):
        first, rank, out, rank_start, out_start = site[piece]
        b = storage[first + slot * site[0, 1] :][: rank * out]
        _add_product(y, h, b, (start, out_start, 0, rank_start), (num_rows, rank, out))


@njit(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], int64[:, ::1], UniTuple(int64, 3),"
    "float32)",
    **OPTIONS,
)
def _add_streamed(y, x, storage, site, run, weight):
    slot, start, stop = run
    size, distance, width = x.shape[1], site[0, 1], site[0, 2]
    h = np.zeros((stop - start, width), dtype=np.float32)
    # By parts that stay in the nearest cache while all rows of the run use them.
    part = size if stop - start == 1 else _A_ROWS
    for k in range(0, size, part):
        end = min(size, k + part)
        a = storage[site[0, 0] + slot * distance + k * width :][: (end - k) * width]
        for i in range(start, stop):
            if width <= MAX_ROW_WIDTH:
                _add_narrow(h[i - start], x[i, k:end], a)
            else:
                _add_rows(h[i - start], x[i, k:end], a)
    h *= weight
    for piece in range(1, len(site)):
        first, rank, out, rank_start, out_start = site[piece]
        step = rank if stop - start == 1 else 1
        for r in range(rank_start, rank_start + rank, step):
            b = storage[first + slot * distance + (r - rank_start) * out :][: step * out]
            for i in range(start, stop):
                _add_rows(y[i, out_start : out_start + out], h[i - start, r : r + step], b)


@njit(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], int64[:, ::1], int64[:, ::1],"
    "float32[::1])",
    parallel=True,
    **OPTIONS,
)
def _add_runs(y, x, storage, site, runs, weights):
    for number in prange(len(runs)):
        slot, start, stop = runs[number]
        if stop - start >= _MIN_TILE_ROWS:
            _add_tiled(y, x, storage, site, (slot, start, stop), weights[number])
        else:
            _add_streamed(y, x, storage, site, (slot, start, stop), weights[number])
