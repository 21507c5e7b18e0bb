"""Kernel tests run on the CPU, Triton's in its interpreter; LORAMUX_TEST_DEVICE=cuda: on a GPU."""

from __future__ import annotations

import importlib
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
    """What a Python program prints that compiles kernels, which an interpreter's process cannot."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


ORDERED = (
    "attention_decode",
    "attention_fold",
    "attention_jit",
    "lora_few",
    "lora_short",
    "short_floats",
    "tail_order",
    "tail",
)
"""Kernels whose tensors have their axes in the order in which a compiler deals them out."""


@pytest.fixture(params=[True, False], ids=["lanes first", "lanes last"])
def both_orders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compilers before Triton 3.7 want axes, and as those since 3.8 do."""
    import triton.language as tl

    for name in ORDERED:
        module = importlib.import_module(f"loramux.kernels.{name}_triton")
        if DEVICE is not None and module.LANES_FIRST.value is not request.param:
            pytest.skip("a GPU's compiler has one order")
        monkeypatch.setattr(module, "LANES_FIRST", tl.constexpr(request.param))
        if hasattr(module, "JOINED_IN_FOURS"):
            monkeypatch.setattr(module, "JOINED_IN_FOURS", tl.constexpr(request.param))
