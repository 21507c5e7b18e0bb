"""Kernel tests run on the CPU, Triton's in its interpreter; LORAMUX_TEST_DEVICE=cuda: on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
