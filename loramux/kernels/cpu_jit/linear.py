"""Compiled linear layer (float32): GEMM, LoRA and epilogue in one parallel loop.

Waking the threads takes 15 us, a twentieth of a small GEMM, and a step has hundreds of GEMMs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit, prange

from loramux.kernels.cpu_jit import gemm as gemm_numba
from loramux.kernels.cpu_jit import lora as lora_numba
from loramux.kernels.cpu_jit.elementwise import apply_epilogue, run_epilogue
from loramux.kernels.cpu_jit.gemm import (
    DONE_RUNS,
    TAKEN_ROWS,
    TAKEN_RUNS,
    take_gemm,
)
from loramux.kernels.cpu_jit.lora import take_runs
from loramux.kernels.cpu_jit.runtime import OPTIONS, add_done, take_next, wait_for
from loramux.kernels.cpu_jit.tiles import FLOAT_BYTES
from loramux.kernels.ops import Array, Epilogue, LoraRows, LoraWeights, PackedMatrix

# Rows of the epilogue that a thread takes at once.
_WORK_ROWS = 4
_NO_ADDRESSES = np.zeros(0, dtype=np.int64)
_NO_SITE = np.zeros((1, 5), dtype=np.int64)
_NO_RUNS = np.zeros((0, 3), dtype=np.int64)
_NO_FLOATS = np.zeros(0, dtype=np.float32)
_NO_EPILOGUE = Epilogue(
    0, _NO_FLOATS.reshape(0, 0), _NO_FLOATS.reshape(0, 0), _NO_FLOATS, np.float32(0)
)


def linear_into(
    x: Array,
    matrix: PackedMatrix,
    adapters: Sequence[tuple[LoraWeights, LoraRows]],
    y: Array,
    epilogue: Epilogue | None = None,
) -> None:
    """y = x @ matrix + what the adapters add, then the epilogue. x, y contiguous"""
    if not adapters:
        addresses, site, width = _NO_ADDRESSES, _NO_SITE, 0
        runs, run_weights = _NO_RUNS, _NO_FLOATS
        num_threads = torch.get_num_threads()
    elif len(adapters) == 1 and len(adapters[0][1].rounds) == 1:
        weights, rows = adapters[0]
        addresses, site, width = lora_numba.prepared(weights)
        runs, run_weights = rows.rounds[0]
        num_threads = rows.num_threads
    else:
        _one_by_one(x, matrix, adapters, y, epilogue)
        return
    packed, counters = gemm_numba.scratch_of(len(x), matrix)
    after = epilogue or _NO_EPILOGUE
    _multiply_add(
        (x, y, lora_numba.scratch_of(width, num_threads), after.source, after.out),
        (packed, matrix.panels, matrix.start, run_weights, after.weight),
        (addresses, counters),
        (site, runs),
        (matrix.depth, after.kind),
        after.eps,
    )


def _one_by_one(
    x: Array,
    matrix: PackedMatrix,
    adapters: Sequence[tuple[LoraWeights, LoraRows]],
    y: Array,
    epilogue: Epilogue | None,
) -> None:
    gemm_numba.multiply_into(x, matrix, y)
    for weights, rows in adapters:
        lora_numba.add_lora_rows(y, x, weights, rows)
    if epilogue is not None:
        run_epilogue(epilogue, y)


@njit("void(int64, UniTuple(int64, 4), UniTuple(int64, 3), int64, float32)", **OPTIONS)
def _take_rows(kind, places, shape, counter, eps):
    num_rows, width, out_width = shape
    row = take_next(counter) * _WORK_ROWS
    while row < num_rows:
        bounds = row, min(row + _WORK_ROWS, num_rows)
        apply_epilogue(kind, places, (width, out_width), bounds, eps)
        row = take_next(counter) * _WORK_ROWS


@njit(
    "void(UniTuple(float32[:, ::1], 5), UniTuple(float32[::1], 5), UniTuple(int64[::1], 2),"
    "UniTuple(int64[:, ::1], 2), UniTuple(int64, 2), float32)",
    parallel=True,
    **OPTIONS,
)
def _multiply_add(matrices, vectors, lists, tables, plan, eps):
    """Pass addresses to the threads: reference counts of a shared array would be contended.

    lists: addresses of adapters, and counters, which are zero; the third matrix is scratch, one row
    per thread.
    """
    x, y, scratch, source, out = matrices
    packed, panels, start, run_weights, weight = vectors
    (adapters, counters), (site, runs), (depth, kind) = lists, tables, plan
    x_at, y_at, count_at = x.ctypes.data, y.ctypes.data, counters.ctypes.data
    places = x_at, packed.ctypes.data, panels.ctypes.data, start.ctypes.data, y_at, count_at
    sizes = x.shape[1], depth, x.shape[0], y.shape[1], start.size
    rows = y_at, y.shape[1] * FLOAT_BYTES, x_at, x.shape[1] * FLOAT_BYTES
    num_runs, num_pieces = len(runs), len(site) - 1
    line = adapters.ctypes.data, site.ctypes.data, runs.ctypes.data, run_weights.ctypes.data
    h, h_bytes = scratch.ctypes.data, scratch.shape[1] * FLOAT_BYTES
    behind = y_at, source.ctypes.data, out.ctypes.data, weight.ctypes.data
    shape = x.shape[0], y.shape[1], out.shape[1]
    num_threads = scratch.shape[0]
    for thread in prange(num_threads):
        take_gemm(places, sizes, num_threads)
        if num_runs:
            tables_at = (*line, count_at + TAKEN_RUNS, h + thread * h_bytes)
            num_done = take_runs(rows, (num_runs, sizes[0], num_pieces), tables_at)
            add_done(count_at + DONE_RUNS, num_done)
        if kind:
            wait_for(count_at + DONE_RUNS, num_runs)
            _take_rows(kind, behind, shape, count_at + TAKEN_ROWS, eps)
