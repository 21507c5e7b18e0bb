"""Selects the op sets, once at start. There is no other switch between implementations."""

from __future__ import annotations

import importlib.util
import platform

import torch

from loramux.errors import UnsupportedModel
from loramux.kernels.ops import (
    DeviceKernels,
    JitGemmOps,
    JitKernels,
    JitLinearOps,
    Kernels,
)
from loramux.kernels.quantised_ops import QuantisedGemmOps
from loramux.types.packing import Fp12PackOps

# bfloat16 matrix instructions and asynchronous copies. From 9.0 on kernels with TMA and
# programmatic dependent launch replace some of the others.
MIN_CAPABILITY = (8, 0)


def select_kernels(
    device_type: str, *, reference: bool, dtype: torch.dtype, may_compile: bool = True
) -> Kernels:
    """Return the op sets of a runner without CUDA graphs: reference, torch on a CPU, or compiled
    loops.
    """
    from loramux.kernels.reference import attention as reference_attention
    from loramux.kernels.reference import lora as reference_lora

    if reference:
        return Kernels(name="torch", attention=reference_attention, lora=reference_lora)
    if may_compile and device_type == "cpu" and dtype == torch.float32:
        compiled = _select_jit(dtype)
        if compiled is not None:
            return Kernels(
                name="numba", attention=compiled.attention, lora=compiled.lora, jit=compiled
            )
    from loramux.kernels.cpu import attention as cpu_attention
    from loramux.kernels.cpu import lora as cpu_lora

    return Kernels(name="cpu", attention=cpu_attention, lora=cpu_lora)


def _select_jit(dtype: torch.dtype) -> JitKernels | None:
    """Compiles the loops, or reads them from an earlier start's cache. None: numba is missing."""
    try:
        from loramux.kernels.cpu_jit import attention, elementwise, lora, runtime
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None
    runtime.use_threads(torch.get_num_threads())
    runtime.pin_workers(torch.get_num_threads())
    return JitKernels(
        attention=attention, elementwise=elementwise, lora=lora, linear=_select_jit_linear(dtype)
    )


def _select_jit_linear(dtype: torch.dtype) -> JitLinearOps | None:
    if not has_jit_gemm(dtype):
        return None
    from loramux.kernels.cpu_jit import linear

    return linear


def has_jit_gemm(dtype: torch.dtype) -> bool:
    """Whether the compiled GEMM is used: with numba, where it was measured to beat oneDNN.

    At 32 rows: aarch64 1.2 times; x86_64 with AVX-512 1.3, with AVX2 1.6 (a whole decode step).
    """
    is_measured = platform.system() == "Linux" and platform.machine() in ("aarch64", "x86_64")
    return is_measured and dtype == torch.float32 and importlib.util.find_spec("numba") is not None


def select_jit_gemm(dtype: torch.dtype) -> JitGemmOps | None:
    """None: oneDNN is used."""
    if not has_jit_gemm(dtype):
        return None
    from loramux.kernels.cpu_jit import gemm

    return gemm


def triton_fault(device: str) -> str | None:
    """Return why Triton cannot compile and run a kernel on the current CUDA device, or None."""
    try:
        from loramux.kernels.gpu.probe import run_probe

        is_right = run_probe(device)
    except Exception as error:  # Triton raises errors of the compiler, the linker and the driver.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if is_right else "it computes wrong results"


def select_fp12_packer() -> Fp12PackOps | None:
    """Return the compiled code that packs adapters on the host; None: numba is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    from loramux.kernels.cpu_jit import fp12

    return fp12


def select_quantised_gemm(device: torch.device, dtype: torch.dtype) -> QuantisedGemmOps | None:
    """Return the GEMMs over quantised weights; None: the device has no FP8 tensor cores, or no
    Triton.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        from loramux.kernels.gpu import pdl
        from loramux.kernels.gpu.gemm import quantised
    except ImportError:
        return None
    return quantised if pdl.supports_pdl(device.type) else None


def select_device_kernels(device: torch.device) -> DeviceKernels:
    """Return the Triton kernels; on a CPU the reference, with Triton's interpreter for attention.

    The CPU form is for tests of the layers above the kernels.
    """
    try:
        from loramux.kernels.gpu import elementwise, pdl, sampling
        from loramux.kernels.gpu.attention import ops as attention
        from loramux.kernels.gpu.extras import ops as extras
        from loramux.kernels.gpu.gemm import swiglu
        from loramux.kernels.gpu.lora import segmented
        from loramux.kernels.gpu.lora_augmented import ops as augmented
    except ImportError as error:
        raise UnsupportedModel(
            f"Serving on {device} needs Triton, which cannot be imported ({error}). "
            "Install a torch build for this GPU, or serve with --device cpu."
        ) from error
    if device.type == "cpu":
        return _interpreted_kernels()
    from loramux.kernels.gpu.cache_keys import compute_cache_keys

    compute_cache_keys()
    return DeviceKernels(
        attention=attention,
        elementwise=elementwise,
        swiglu=swiglu,
        lora=segmented,
        augmented=augmented,
        extras=extras,
        sampling=sampling,
        num_sms=pdl.num_sms(device.type),
        supports_pdl=pdl.supports_pdl(device.type),
    )


def _interpreted_kernels() -> DeviceKernels:
    from loramux.kernels.gpu.attention import ops as attention
    from loramux.kernels.reference import (
        elementwise,
        extras,
        lora_augmented,
        lora_segmented,
        sampling,
    )

    return DeviceKernels(
        attention=attention,
        elementwise=elementwise,
        swiglu=None,
        lora=lora_segmented,
        augmented=lora_augmented,
        extras=extras,
        sampling=sampling,
        num_sms=1,
        supports_pdl=False,
    )
