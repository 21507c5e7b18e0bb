"""Fast on a CPU, in float32: a product and what its rows' adapters add, by threads that are awake.

To wake them takes 15 us, a twentieth of a small product, and a step has hundreds of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from loramux.kernels import gemm_numba, lora_numba
from loramux.kernels.gemm_numba import TAKEN_RUNS, PackedMatrix, take_product
from loramux.kernels.interface import LoraRows, LoraWeights
from loramux.kernels.lora_numba import take_runs
from loramux.kernels.math_numba import OPTIONS
from loramux.kernels.tile_numba import FLOAT_BYTES


def multiply_add_into(
    x: NDArray[np.float32],
    matrix: PackedMatrix,
    adapters: Sequence[tuple[LoraWeights, LoraRows]],
    y: NDArray[np.float32],
) -> None:
    """y = x @ matrix, and what the adapters add to it; x and y without gaps between their rows."""
    if len(adapters) != 1 or len(adapters[0][1].rounds) != 1:
        gemm_numba.multiply_into(x, matrix, y)
        for weights, rows in adapters:
            lora_numba.add_lora_rows(y, x, weights, rows)
        return
    weights, rows = adapters[0]
    addresses, site, width = lora_numba.prepared(weights)
    runs, run_weights = rows.rounds[0]
    packed, counters = gemm_numba.scratch_of(len(x), matrix)
    _multiply_add(
        (x, y),
        (packed, matrix.panels, matrix.start),
        matrix.depth,
        addresses,
        (site, runs),
        run_weights,
        counters,
        lora_numba.scratch_of(width, rows.num_threads),
    )


@njit(
    "void(UniTuple(float32[:, ::1], 2), UniTuple(float32[::1], 3), int64, int64[::1],"
    "UniTuple(int64[:, ::1], 2), float32[::1], int64[::1], float32[:, ::1])",
    parallel=True,
    **OPTIONS,
)
def _multiply_add(arrays, factors, depth, adapters, tables, weights, counters, scratch):
    """By addresses: two threads that count the uses of one array wait for each other.

    counters: zero; scratch: of each thread.
    """
    (x, y), (packed, panels, start), (site, runs) = arrays, factors, tables
    x_at, y_at, count_at = x.ctypes.data, y.ctypes.data, counters.ctypes.data
    places = x_at, packed.ctypes.data, panels.ctypes.data, start.ctypes.data, y_at, count_at
    sizes = x.shape[1], depth, x.shape[0], y.shape[1], start.size
    rows = y_at, y.shape[1] * FLOAT_BYTES, x_at, x.shape[1] * FLOAT_BYTES
    size = len(runs), x.shape[1], len(site) - 1
    lists = adapters.ctypes.data, site.ctypes.data, runs.ctypes.data, weights.ctypes.data
    taken, h, h_bytes = count_at + TAKEN_RUNS, scratch.ctypes.data, scratch.shape[1] * FLOAT_BYTES
    num_threads = scratch.shape[0]
    for thread in prange(num_threads):
        take_product(places, sizes, num_threads)
        take_runs(rows, size, (*lists, taken, h + thread * h_bytes))
