"""Compiled LoRA (float32): each run of rows reads its adapter once, by loops or register tiles.

Both sum in the same order, so that a row's result does not depend on its run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import get_num_threads, njit, prange
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.cpu_jit.runtime import LONG_BYTES, OPTIONS, floats_at, longs_at, take_next
from loramux.kernels.cpu_jit.tiles import (
    DIRECT_WIDTH,
    FLOAT_BYTES,
    LINE_BYTES,
    MAX_ROW_WIDTH,
    NARROW_WIDTH,
    direct_rows_at,
    direct_tile,
    multiply_add,
    row_tile,
)
from loramux.kernels.ops import LoraRows, LoraWeights, Segment
from loramux.kernels.segments import rounds_of

# Most rows of a run: longer segments are divided, so that every thread has work.
_RUN_ROWS = 32
# From here on by tiles: a loaded matrix row serves several rows of x.
_MIN_TILE_ROWS = 3
_A_ROWS = 128
# Columns of the tables that the loops below read.
_SITE_FIELDS = 5
_RUN_FIELDS = 3
# Past a thread's scratch: a cache line that takes the result of prefetching reads.
_SINK_FLOATS = LINE_BYTES // FLOAT_BYTES

READS_ADDRESSES = True


def cut_rows(segments: Sequence[Segment], num_slots: int) -> LoraRows:
    num_threads = get_num_threads()
    return LoraRows(
        segments=tuple(segments),
        rounds=tuple(_runs(members, num_threads) for members in rounds_of(segments)),
        num_threads=num_threads,
    )


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, rows: LoraRows) -> None:
    """y[i] += weight(i) * x[i] @ a[slot(i)] @ b[slot(i)]; rows without an adapter are untouched."""
    add_lora_rows(y.numpy(), x.contiguous().numpy(), weights, rows)


def add_lora_rows(
    y: NDArray[np.float32], x: NDArray[np.float32], weights: LoraWeights, rows: LoraRows
) -> None:
    """`add_lora` of contiguous arrays."""
    addresses, site, width = prepared(weights)
    for runs, run_weights in rows.rounds:
        # Waking the other threads would take longer than the work.
        is_alone = len(runs) == 1
        scratch = scratch_of(width, 1 if is_alone else rows.num_threads)
        add = _add_run if is_alone else _add_runs
        add(y, x, addresses, site, runs, run_weights, np.zeros(1, dtype=np.int64), scratch)


def scratch_of(width: int, num_threads: int) -> NDArray[np.float32]:
    """One row per thread, for x @ a of a run."""
    return np.empty((num_threads, _RUN_ROWS * width + _SINK_FLOATS), dtype=np.float32)


def _runs(
    segments: Sequence[Segment], num_threads: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    # Few rows are divided among all threads, even if all have the same adapter.
    size = min(-(-sum(s.stop - s.start for s in segments) // num_threads), _RUN_ROWS)
    runs = [
        ((s.slot, start, min(start + size, s.stop)), s.weight)
        for s in segments
        for start in range(s.start, s.stop, size)
    ]
    # Longest first, so that no thread starts a long run last.
    runs.sort(key=lambda run: run[0][1] - run[0][2])
    return np.array([r for r, _ in runs], np.int64), np.array([w for _, w in runs], np.float32)


def prepared(weights: LoraWeights) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Addresses of the adapters, offsets of the site in them, and its total rank; made once.

    The table's first line is (start of a, total rank, 0, 0, 0), and each other line a slice: (start
    of b, rank, out, rank_start, out_start). Starts are in bytes, from the adapter's first.
    """
    if not weights.prepared:
        a = weights.a
        for piece in weights.slices:
            assert piece.b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
            assert piece.b.stride(0) == a.stride(0), "an adapter is one run of its stack"
        lines = [(a.storage_offset() * FLOAT_BYTES, a.shape[2], 0, 0, 0)]
        for piece in weights.slices:
            rank, out_features = piece.b.shape[1:]
            start = piece.b.storage_offset() * FLOAT_BYTES
            lines.append((start, rank, out_features, piece.rank_start, piece.out_start))
        addresses = weights.addresses
        if addresses is None:
            distance = a.stride(0) * FLOAT_BYTES
            first = a.untyped_storage().data_ptr()
            addresses = first + distance * np.arange(len(a), dtype=np.int64)
        weights.prepared.append((addresses, np.array(lines, dtype=np.int64), a.shape[2]))
    return weights.prepared[0]


@njit("void(UniTuple(int64, 5))", **OPTIONS)
def _add_rows(args):
    """args: y, factors, matrix, depth, width. y += factors @ matrix, row after row of the matrix.

    Memory is read as fast as it comes.
    """
    y, factors, matrix, depth, width = args
    into, values = floats_at(y, width), floats_at(factors, depth)
    for k in range(depth):
        factor, row = values[k], floats_at(matrix + k * width * FLOAT_BYTES, width)
        for j in range(width):
            into[j] = multiply_add(row[j], factor, into[j])


@njit("void(UniTuple(int64, 5))", **OPTIONS)
def _add_narrow(args):
    """`_add_rows` for a matrix of few columns, whose sums stay in registers."""
    y, factors, matrix, depth, width = args
    column, stride = 0, width * FLOAT_BYTES
    while width - column > 0:
        at = column * FLOAT_BYTES
        done = row_tile(width - column, (factors, matrix + at, stride, y + at, depth))
        if not done:
            break
        column += done
    into, values = floats_at(y, width), floats_at(factors, depth)
    whole = floats_at(matrix, depth * width)
    for j in range(column, width):
        total = into[j]
        for k in range(depth):
            total = multiply_add(whole[k * width + j], values[k], total)
        into[j] = total


@njit("void(UniTuple(int64, 5), UniTuple(int64, 3))", **OPTIONS)
def _add_gemm(places, size):
    """places: y, y_stride, x, x_stride, matrix. y += x @ matrix, by tiles.

    Row by row through a matrix that is wide, so that y and it are read as they lie in memory.
    """
    y, y_stride, x, x_stride, matrix = places
    num_rows, depth, width = size
    stride, whole = width * FLOAT_BYTES, width // NARROW_WIDTH * NARROW_WIDTH
    row, column = 0, 0
    while row < num_rows and column < whole:
        count = direct_rows_at(row, num_rows)
        num_columns = DIRECT_WIDTH if whole - column >= DIRECT_WIDTH else NARROW_WIDTH
        at = column * FLOAT_BYTES
        source, target = x + row * x_stride, y + row * y_stride + at
        args = (source, x_stride, matrix + at, stride, target, y_stride, depth)
        direct_tile(count, num_columns, args)
        if width > depth:
            column += num_columns
            if column == whole:
                row, column = row + count, 0
        else:
            row += count
            if row == num_rows:
                row, column = 0, column + num_columns
    if whole == width:
        return
    values = floats_at(matrix, depth * width)
    for i in range(num_rows):
        into, factors = floats_at(y + i * y_stride, width), floats_at(x + i * x_stride, depth)
        for k in range(depth):
            for j in range(whole, width):
                into[j] = multiply_add(values[k * width + j], factors[k], into[j])


@njit("void(int64, int64, int64)", **OPTIONS)
def _touch(start, num_floats, sink):
    """Read one float per cache line in address order, which is faster than the order of tiles."""
    values, total = floats_at(start, num_floats), np.float32(0)
    for i in range(0, num_floats, LINE_BYTES // FLOAT_BYTES):
        total += values[i]
    floats_at(sink, 1)[0] = total


@njit("void(int64, int64, float32)", **OPTIONS)
def _scale(start, count, weight):
    values = floats_at(start, count)
    for i in range(count):
        values[i] *= weight


@njit("void(UniTuple(int64, 5), UniTuple(int64, 3), UniTuple(int64, 2), float32)", **OPTIONS)
def _add_tiled(places, size, adapter, weight):
    """places: y, y_stride, x, x_stride, h, of the run's first row; adapter: its start, its site."""
    y, y_stride, x, x_stride, h = places
    num_rows, depth, num_pieces = size
    start, site = adapter
    line = longs_at(site, _SITE_FIELDS)
    width, h_stride = line[1], line[1] * FLOAT_BYTES
    a, sink = start + line[0], h + _RUN_ROWS * h_stride
    _touch(a, depth * width, sink)
    _add_gemm((h, h_stride, x, x_stride, a), (num_rows, depth, width))
    _scale(h, num_rows * width, weight)
    for piece in range(1, num_pieces + 1):
        line = longs_at(site + piece * _SITE_FIELDS * LONG_BYTES, _SITE_FIELDS)
        first, rank, out, rank_start, out_start = line[0], line[1], line[2], line[3], line[4]
        target, source = y + out_start * FLOAT_BYTES, h + rank_start * FLOAT_BYTES
        _touch(start + first, rank * out, sink)
        matrices = (target, y_stride, source, h_stride, start + first)
        _add_gemm(matrices, (num_rows, rank, out))


@njit("void(UniTuple(int64, 5), UniTuple(int64, 3), UniTuple(int64, 2), float32)", **OPTIONS)
def _add_streamed(places, size, adapter, weight):
    """`_add_tiled` for few rows, bound by reading the adapter."""
    y, y_stride, x, x_stride, h = places
    num_rows, depth, num_pieces = size
    start, site = adapter
    line = longs_at(site, _SITE_FIELDS)
    width, h_stride = line[1], line[1] * FLOAT_BYTES
    # In blocks that stay in the L1 cache while all rows of the run use them.
    part = depth if num_rows == 1 else _A_ROWS
    for k in range(0, depth, part):
        a, count = start + line[0] + k * h_stride, min(part, depth - k)
        for i in range(num_rows):
            args = (h + i * h_stride, x + i * x_stride + k * FLOAT_BYTES, a, count, width)
            if width <= MAX_ROW_WIDTH:
                _add_narrow(args)
            else:
                _add_rows(args)
    _scale(h, num_rows * width, weight)
    for piece in range(1, num_pieces + 1):
        line = longs_at(site + piece * _SITE_FIELDS * LONG_BYTES, _SITE_FIELDS)
        first, rank, out, rank_start, out_start = line[0], line[1], line[2], line[3], line[4]
        step = rank if num_rows == 1 else 1
        for r in range(0, rank, step):
            b = start + first + r * out * FLOAT_BYTES
            for i in range(num_rows):
                factors = h + i * h_stride + (rank_start + r) * FLOAT_BYTES
                _add_rows((y + i * y_stride + out_start * FLOAT_BYTES, factors, b, step, out))


@njit("int64(UniTuple(int64, 4), UniTuple(int64, 3), UniTuple(int64, 6))", **OPTIONS)
def take_runs(rows, size, tables):
    """Take runs one by one, since a prefill's run takes as long as many decodes'.

    Returns the number of runs of this thread.
    """
    y, y_stride, x, x_stride = rows
    num_runs, depth, num_pieces = size
    addresses, site, runs, weights, counter, h = tables
    width, num_done = longs_at(site, _SITE_FIELDS)[1], 0
    number = take_next(counter)
    while number < num_runs:
        run = longs_at(runs + number * _RUN_FIELDS * LONG_BYTES, _RUN_FIELDS)
        slot, start, num_rows = run[0], run[1], run[2] - run[1]
        floats_at(h, num_rows * width)[:] = np.float32(0)
        adapter = (longs_at(addresses + slot * LONG_BYTES, 1)[0], site)
        places = (y + start * y_stride, y_stride, x + start * x_stride, x_stride, h)
        weight = floats_at(weights + number * FLOAT_BYTES, 1)[0]
        if num_rows >= _MIN_TILE_ROWS:
            _add_tiled(places, (num_rows, depth, num_pieces), adapter, weight)
        else:
            _add_streamed(places, (num_rows, depth, num_pieces), adapter, weight)
        num_done += 1
        number = take_next(counter)
    return num_done


_ADD_RUNS = (
    "void(float32[:, ::1], float32[:, ::1], int64[::1], int64[:, ::1], int64[:, ::1],"
    "float32[::1], int64[::1], float32[:, ::1])"
)


@njit(_ADD_RUNS, parallel=True, **OPTIONS)
def _add_runs(y, x, addresses, site, runs, weights, taken, scratch):
    """Pass addresses to the threads: reference counts of a shared array would be contended.

    taken: zero; scratch: of each thread.
    """
    rows = y.ctypes.data, y.shape[1] * FLOAT_BYTES, x.ctypes.data, x.shape[1] * FLOAT_BYTES
    size = len(runs), x.shape[1], len(site) - 1
    h, h_bytes = scratch.ctypes.data, scratch.shape[1] * FLOAT_BYTES
    lists = addresses.ctypes.data, site.ctypes.data, runs.ctypes.data, weights.ctypes.data
    counter = taken.ctypes.data
    for thread in prange(scratch.shape[0]):
        take_runs(rows, size, (*lists, counter, h + thread * h_bytes))


@njit(_ADD_RUNS, **OPTIONS)
def _add_run(y, x, addresses, site, runs, weights, taken, scratch):
    """`_add_runs` on the calling thread alone."""
    rows = y.ctypes.data, y.shape[1] * FLOAT_BYTES, x.ctypes.data, x.shape[1] * FLOAT_BYTES
    size = len(runs), x.shape[1], len(site) - 1
    lists = addresses.ctypes.data, site.ctypes.data, runs.ctypes.data, weights.ctypes.data
    take_runs(rows, size, (*lists, taken.ctypes.data, scratch.ctypes.data))
