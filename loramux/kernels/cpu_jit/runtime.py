"""What the compiled CPU kernels share: options, threads, atomics, and a vectorised exp."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, float32, njit, prange, set_num_threads, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from loramux.kernels.cpu_jit.disk_cache import can_cache

OPTIONS: dict[str, Any] = {
    # Lets loops be vectorised: sums in any order, no check of divisors. NaN is kept.
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
    "nogil": True,
    "cache": can_cache(Path(__file__).parent),
}

# For elementwise code, in the order written. Numba inlines functions into their callers and
# optimises them again; which copy runs may depend on what a cache holds, so that with reordered
# sums results would not always be bitwise equal.
EXACT: dict[str, Any] = {**OPTIONS, "fastmath": {"contract", "nsz"}}

LONG_BYTES = 8

# Some microseconds; then another process probably runs on the other thread's core.
_MAX_LOOKS = 4096

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


def use_threads(count: int) -> None:
    """Use as many threads as torch's GEMMs."""
    set_num_threads(min(count, int(config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]


def _take_next(_, address):
    """Atomic fetch-and-add of 1: no two threads get the same value."""

    def code(context, builder, signature, values):
        place = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), code


take_next: Any = intrinsic(_take_next)


def _add_done(_, address, count):
    """Atomic add with release: a thread that sees it in `wait_for` sees all earlier writes."""

    def code(context, builder, signature, values):
        place = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        builder.atomic_rmw("add", place, values[1], "release")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _value_now(_, address):
    def code(context, builder, signature, values):
        place = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", LONG_BYTES)

    return types.int64(types.int64), code


add_done: Any = intrinsic(_add_done)
_value: Any = intrinsic(_value_now)
_give_way: Any = types.ExternalFunction("sched_yield", types.int32())


@njit("void(int64, int64)", **OPTIONS)
def wait_for(address, count):
    """Spins until the counter reaches `count`; other threads must not wait for this one."""
    num_looks = 0
    while _value(address) < count:
        num_looks += 1
        if num_looks > _MAX_LOOKS:
            _give_way()


def _pointer_of(kind: Any) -> Any:
    @intrinsic
    def pointer(_, address):
        def code(context, builder, signature, values):
            target = context.get_value_type(types.CPointer(kind))
            return builder.inttoptr(values[0], target)

        return types.CPointer(kind)(types.int64), code

    return pointer


_float_pointer, _long_pointer = _pointer_of(types.float32), _pointer_of(types.int64)


@njit(inline="always", error_model="numpy")
def floats_at(address, count):
    """Return an array over memory that the caller keeps alive, without reference counting."""
    return carray(_float_pointer(address), count)


@njit(inline="always", error_model="numpy")
def longs_at(address, count):
    return carray(_long_pointer(address), count)


@njit(inline="always", error_model="numpy")
def exp(x):
    """2^n * e^r with |r| <= ln(2) / 2, by a polynomial; within 2 units in the last place.

    NaN stays NaN: the bounds alone would make a number of it.
    """
    bounded = min(max(x, float32(-87.0)), float32(88.0))
    n = np.floor(bounded * _LOG2_E + float32(0.5))
    r = (bounded if x == x else x) - n * _LN2_HIGH - n * _LN2_LOW
    p = float32(1.9875691500e-4)
    p = p * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + float32(1.0)) * power


# Size of the kernel's CPU sets.
_MASK_BITS = 1024

_set_affinity: Any = types.ExternalFunction(
    "sched_setaffinity", types.int32(types.int32, types.int64, types.int64)
)


def pin_workers(num_threads: int) -> bool:
    """Pins each worker thread of the compiled loops to a core of its own; False: not pinned.

    Two threads that wake each other hundreds of times a step are at times scheduled on one core,
    where they wait for each other: every tenth step took 10 % longer. Left to the system where
    OpenMP's affinity is set, or where the number of threads is not that of the cores. The calling
    thread stays free: the others leave one core for it.
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
