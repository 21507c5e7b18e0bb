"""Kernel tests run on the CPU, Triton's in its interpreter; LORAMUX_TEST_DEVICE=cuda: on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("LORAMUX_TEST_DEVICE")


class DeviceGenerator(torch.Generator):
    def __new__(cls) -> DeviceGenerator:
        return super().__new__(cls, DEVICE)


@pytest.fixture(autouse=True)
def on_test_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor that a test makes, and every generator, is on that device."""
    if DEVICE is None:
        yield
        return
    monkeypatch.setattr(torch, "Generator", DeviceGenerator)
    with torch.device(DEVICE):
        yield


def output_of_compiler(program: str, cache: Path) -> str:
    """Return what a Python program prints that compiles kernels, which an interpreter's process
    cannot.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
