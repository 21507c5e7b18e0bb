"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

import torch


def describe_machine(dtype: str) -> dict[str, str]:
    packages = ("loramux", "torch", "transformers", "peft")
    return {
        "CPU": f"{_cpu_name()} ({platform.machine()}), {torch.get_num_threads()} threads",
        "load at start": f"{os.getloadavg()[0]:.1f}",
        "dtype": dtype,
        "Python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    text = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "Model name" in line]
    return names[0] if names else platform.processor()
