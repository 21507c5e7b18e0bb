"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess

import torch

import loramux


def describe_machine(dtype: str, device: str = "cpu") -> dict[str, str]:
    packages = ("loramux", "torch", "transformers", "peft")
    if torch.device(device).type == "cuda":
        packages = ("loramux", "torch", "triton", "transformers")
    return {
        "device": _device_name(device),
        "CPU": f"{_cpu_name()} ({platform.machine()}), {torch.get_num_threads()} threads",
        "load at start": f"{os.getloadavg()[0]:.1f}",
        "dtype": dtype,
        "Python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    if package == "loramux":
        return loramux.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device_name(device: str) -> str:
    if torch.device(device).type != "cuda":
        return device
    memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory_gib:.0f} GiB"


def _cpu_name() -> str:
    if shutil.which("lscpu") is None:
        return platform.processor()
    text = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "Model name" in line]
    return names[0] if names else platform.processor()
