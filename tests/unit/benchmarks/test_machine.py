from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.lib.machine import PowerMeter, visible_device

SCRIPT = """#!/bin/sh
echo "$@" > {folder}/arguments
echo "700.50, 1600"
echo "[N/A], 1600"
echo "699.50, 1500"
echo "cut o"
touch {folder}/told
exec sleep 60
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(SCRIPT.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_samples_are_averaged_and_nvidia_smi_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    meter = PowerMeter(device=2)
    with meter:
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
    assert meter._process is not None and meter._process.poll() is not None
    whole, last = meter.mean(), meter.mean(1)
    assert whole is not None and (whole.watts, whole.mhz) == (700.0, 1550.0)
    assert last is not None and (last.watts, last.mhz) == (699.5, 1500.0)
    assert meter.num_samples == 2 and meter.mean(2) is None
    assert "--id=2" in (tmp_path / "arguments").read_text()


def test_without_nvidia_smi_there_are_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with PowerMeter() as meter:
        assert meter.mean() is None


@pytest.mark.parametrize(("value", "device"), [("3,1", 3), ("GPU-8f2", 0), ("", 0)])
def test_the_metered_gpu_is_the_first_visible_one(
    value: str, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_device() == device
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_device() == 0
