"""Programmatic dependent launch (PDL), device properties, and helpers of all Triton kernels."""

from __future__ import annotations

import functools
import sys

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import driver

HOPPER = 90


@functools.cache
def supports_pdl(device_type: str) -> bool:
    """Whether a kernel may start before the one ahead of it ends (Hopper and later)."""
    if device_type != "cuda":
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= HOPPER)


def pdl_options(device_type: str) -> dict[str, bool]:
    """Keyword arguments of a launch whose kernel calls pdl_wait_and_launch."""
    if supports_pdl(device_type):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def supports_tma(device_type: str) -> bool:
    """Whether the device has TMA; the interpreter emulates it."""
    return device_type != "cuda" or supports_pdl(device_type)


@functools.cache
def num_sms(device_type: str) -> int:
    """Return the number of SMs; a few for the interpreter, so that long spans are split there as
    well.
    """
    return 8 if device_type != "cuda" else _property("multiprocessor_count")


@functools.cache
def shared_bytes(device_type: str) -> int:
    """Most shared memory of one CTA; unlimited in the interpreter."""
    return sys.maxsize if device_type != "cuda" else _property("max_shared_mem")


def _property(name: str) -> int:
    device = driver.active.get_current_device()
    return int(driver.active.utils.get_device_properties(device)[name])


@triton.jit
def pdl_wait_and_launch(PDL: tl.constexpr):
    """Wait for the kernel ahead, then let the next one start.

    In this order, so that data written two kernels ago or earlier is complete when a kernel starts
    and may be read before the call.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the kernel ahead; where it is waited for again, there is nothing to wait for.

    All programs must, or the next kernel might not have it behind it.
    """
    if PDL:
        cuda.gdc_wait()


@triton.jit
def opaque(x, IS_COMPILED: tl.constexpr):
    """x; for all the compiler knows another one each time it is asked for.

    In a loop, what is made of x is made again then, and not kept in more registers than x has.
    """
    if IS_COMPILED and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x


@triton.jit
def axis(size: tl.constexpr, place: tl.constexpr, AXES: tl.constexpr):
    """0 .. size along axis `place` of AXES axes.

    Kernels order the axes of a tensor as Triton 3.6 assigns them: the last axis is what a thread
    holds, the others go to threads and warps from the first on. Releases that assign them in
    another order compute the same, with layout conversions through shared memory.
    """
    numbers = tl.arange(0, size)
    for _ in tl.static_range(place):
        numbers = tl.expand_dims(numbers, 0)
    for _ in tl.static_range(AXES - 1 - place):
        numbers = tl.expand_dims(numbers, -1)
    return numbers
