"""What the compiled CPU kernels share: options, how threads share work, and an exp by vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, float32, njit, set_num_threads, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from loramux.kernels.cpu_jit.disk_cache import can_cache

OPTIONS: dict[str, Any] = {
    # So that loops become vector code: sums in any order, and no check of divisors. NaN is kept.
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
    "nogil": True,
    "cache": can_cache(Path(__file__).parent),
}

# For what has one value an element: in the order that is written. Numba puts a copy of a function
# into those that call it and optimizes it once more; which one runs may depend on what a cache
# holds, so that sums in any order would not always be the same to the bit.
EXACT: dict[str, Any] = {**OPTIONS, "fastmath": {"contract", "nsz"}}

LONG_BYTES = 8

# Some microseconds: then somebody else has the other thread's core.
_MAX_LOOKS = 4096

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


def use_threads(count: int) -> None:
    """As many as the matrix products have."""
    set_num_threads(min(count, int(config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]


def _take_next(_, address):
    """The value there, which is one more afterwards: no two threads get the same."""

    def code(context, builder, signature, values):
        place = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), code


take_next: Any = intrinsic(_take_next)


def _add_done(_, address, count):
    """Adds to the value there: whoever sees it by `wait_for` sees all that was written before."""

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
    """Until so much is done of what other threads have begun; their work must not wait for this."""
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
    """An array over memory that something else keeps: nobody counts its uses."""
    return carray(_float_pointer(address), count)


@njit(inline="always", error_model="numpy")
def longs_at(address, count):
    return carray(_long_pointer(address), count)


@njit(inline="always", error_model="numpy")
def exp(x):
    """2^n * e^r with |r| <= ln(2) / 2, by a polynomial; within 2 units in the last place."""
    bounded = min(max(x, float32(-87.0)), float32(88.0))
    n = np.floor(bounded * _LOG2_E + float32(0.5))
    r = bounded - n * _LN2_HIGH - n * _LN2_LOW
    p = float32(1.9875691500e-4)
    p = p * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + float32(1.0)) * power
