"""The GPUs that torch sees, and why it sees none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia/gpus")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device of torch."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int

    @property
    def device(self) -> str:
        return "cuda" if self.index == 0 else f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class GpuFault:
    """Why a GPU cannot be used, and what to do about it."""

    reason: str
    fix: str


def has_nvidia_gpu() -> bool:
    """Return whether the operating system shows an NVIDIA GPU, whatever torch can do."""
    return any(_DEVICES.glob("nvidia[0-9]*")) or any(_DRIVER.glob("*"))


def visible_gpus() -> list[Gpu] | GpuFault:
    """Return the GPUs that this process may use, at least one, or why there are none."""
    if torch.version.cuda is None:
        kind = "for ROCm" if torch.version.hip else "without CUDA"
        return GpuFault(
            f"torch {torch.__version__} is built {kind}", "Install a CUDA build of torch."
        )
    if os.environ.get(_VISIBLE, "0").strip() in ("", "-1", "none", "NoDevFiles"):
        hidden = os.environ[_VISIBLE]
        return GpuFault(f"{_VISIBLE}={hidden!r} hides all GPUs", f"Unset {_VISIBLE}.")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        message = str(error).splitlines()[0].rstrip(".")
        return GpuFault(
            f"CUDA cannot be initialised: {message}",
            "Check that nvidia-smi works here, and that the driver is recent enough for CUDA "
            f"{torch.version.cuda}; a container needs --gpus all.",
        )
    found = [_describe(index) for index in range(torch.cuda.device_count())]
    return found or GpuFault("no GPU is visible", "Start the container with --gpus all.")


def _describe(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
    )


def use_gpu(gpu: Gpu) -> GpuFault | None:
    """Make a GPU the calling thread's current device; return a fault if torch cannot run on it.

    Triton launches its kernels on the current device.
    """
    try:
        torch.cuda.set_device(gpu.index)
        torch.zeros(1, device=gpu.device).add_(1).item()
    except RuntimeError as error:
        message = str(error).splitlines()[0].rstrip(".")
        return GpuFault(
            f"torch {torch.__version__} cannot run on the {gpu.name}: {message}",
            f"Install a torch build for compute capability {gpu.capability[0]}."
            f"{gpu.capability[1]}, and check with nvidia-smi that the GPU has free memory.",
        )
    return None
