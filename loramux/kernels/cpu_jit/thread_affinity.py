"""Each worker thread of the compiled loops on a core of its own.

Two threads that wake each other hundreds of times a step are at times put on one core, where they
wait for each other until the system notices: every tenth step took 10 % longer for it, and more
while adapters were loaded beside it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from numba import njit, prange, types

from loramux.kernels.cpu_jit.runtime import OPTIONS

# Of the system's own sets of cores.
_MASK_BITS = 1024

_set_affinity: Any = types.ExternalFunction(
    "sched_setaffinity", types.int32(types.int32, types.int64, types.int64)
)


def pin_workers(num_threads: int) -> bool:
    """False: left to the system, as where somebody has chosen otherwise or has other threads.

    The calling thread is free: with a core for each of the others, one is left for it.
    """
    if sys.platform != "linux" or os.environ.keys() & {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY"}:
        return False
    cores = sorted(os.sched_getaffinity(0))
    if num_threads < 2 or num_threads != len(cores) or cores[-1] >= _MASK_BITS:
        return False
    bits = np.zeros((num_threads, _MASK_BITS), dtype=np.uint8)
    bits[np.arange(num_threads), cores] = 1
    masks = np.packbits(bits, axis=1, bitorder="little")
    _pin(masks, num_threads)
    return True


@njit("void(uint8[:, ::1], int64)", parallel=True, **OPTIONS)
def _pin(masks, num_threads):
    size = masks.shape[1]
    for thread in prange(num_threads):
        if thread > 0:
            _set_affinity(0, size, masks.ctypes.data + thread * size)
