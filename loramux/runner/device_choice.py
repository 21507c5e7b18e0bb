"""Chooses the device of an engine, and resolves the settings that depend on it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from loramux.config.engine import EngineConfig, ResolvedConfig
from loramux.config.fields import AUTO
from loramux.errors import InvalidRequest
from loramux.kernels.select import MIN_CAPABILITY, triton_fault
from loramux.memory.gpus import Gpu, GpuFault, has_nvidia_gpu, use_gpu, visible_gpus
from loramux.memory.host_memory import available_memory_bytes

CPU = "cpu"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The device of an engine."""

    device: str
    """cpu, cuda or cuda:N"""
    gpu_name: str | None = None
    reason: str | None = None
    """Why the CPU was chosen although the machine has an NVIDIA GPU."""


def resolve_config(config: EngineConfig) -> tuple[ResolvedConfig, DeviceChoice]:
    """Choose the device and replace every `auto`; a CPU fallback beside a GPU is logged."""
    choice = choose_device(config.device)
    if choice.reason is not None:
        _log.warning("The CPU is used, not the GPU: %s", choice.reason)
    resolved = config.resolve(choice.device, available_bytes=available_memory_bytes())
    return resolved, choice


def choose_device(wanted: str = AUTO) -> DeviceChoice:
    """Choose the first usable GPU or the CPU for `auto`, else check the device that is named.

    Raises InvalidRequest if a named GPU cannot be used. LORAMUX_KERNELS=cpu and triton select
    kernels that run on a CPU, and with them `auto` is the CPU.
    """
    if wanted == CPU:
        return DeviceChoice(device=CPU)
    if wanted == AUTO and os.environ.get("LORAMUX_KERNELS") in ("cpu", "triton"):
        return DeviceChoice(device=CPU)
    found = _usable_gpu(wanted)
    if isinstance(found, Gpu):
        return DeviceChoice(device=found.device, gpu_name=found.name)
    if wanted != AUTO:
        raise InvalidRequest(
            f"The device {wanted} cannot be used: {found.reason}. {found.fix} Or use the device "
            f"{CPU}.",
            param="device",
        )
    if has_nvidia_gpu():
        return DeviceChoice(device=CPU, reason=f"{found.reason}. {found.fix}")
    return DeviceChoice(device=CPU)


def _usable_gpu(wanted: str) -> Gpu | GpuFault:
    """Return the first GPU that meets `wanted` and can be used, or what is wrong with the first."""
    gpus = visible_gpus()
    if isinstance(gpus, GpuFault):
        return gpus
    index = wanted.partition(":")[2]
    if wanted != AUTO:
        gpus = [gpu for gpu in gpus if gpu.index == int(index or 0)]
    faults = []
    for gpu in gpus:
        fault = _fault_of(gpu)
        if fault is None:
            return gpu
        faults.append(fault)
    if faults:
        return faults[0]
    return GpuFault("there is no GPU with this number", "nvidia-smi -L lists the GPUs.")


def _fault_of(gpu: Gpu) -> GpuFault | None:
    if gpu.capability < MIN_CAPABILITY:
        return GpuFault(
            f"the {gpu.name} has compute capability {_dotted(gpu.capability)}, and the kernels "
            f"need {_dotted(MIN_CAPABILITY)}",
            "Use an Ampere GPU or a later one.",
        )
    fault = use_gpu(gpu)
    if fault is not None:
        return fault
    message = triton_fault(gpu.device)
    if message is None:
        return None
    return GpuFault(
        f"Triton cannot run a kernel on the {gpu.name}: {message}",
        "Triton comes with the CUDA builds of torch and needs a C compiler (gcc) and Python's "
        "header files.",
    )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
