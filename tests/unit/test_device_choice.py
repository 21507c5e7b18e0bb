"""The choice of a device on machines with other GPUs, drivers and builds of torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loramux.config.engine import EngineConfig
from loramux.errors import InvalidRequest
from loramux.kernels import select
from loramux.memory import gpus
from loramux.memory.gpus import Gpu, GpuFault, visible_gpus
from loramux.runner import device_choice
from loramux.runner.device_choice import DeviceChoice, choose_device, resolve_config

H200 = Gpu(0, "NVIDIA H200", (9, 0), 140 * 2**30)
T4 = Gpu(0, "Tesla T4", (7, 5), 15 * 2**30)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the GPUs of the machine; `broken` are those on which torch or Triton fails."""
    monkeypatch.delenv("LORAMUX_KERNELS", raising=False)

    def set_up(
        *found: Gpu,
        fault: GpuFault | None = None,
        broken: tuple[int, ...] = (),
        triton: str | None = None,
    ) -> None:
        seen = fault or list(found)
        no_image = GpuFault("no kernel image", "Install another torch.")
        monkeypatch.setattr(device_choice, "visible_gpus", lambda: seen)
        monkeypatch.setattr(device_choice, "has_nvidia_gpu", lambda: bool(found))
        monkeypatch.setattr(
            device_choice, "use_gpu", lambda gpu: no_image if gpu.index in broken else None
        )
        monkeypatch.setattr(device_choice, "triton_fault", lambda device: triton)

    return set_up


def test_auto_is_the_first_usable_gpu(machine: Callable[..., None]) -> None:
    machine(H200)
    assert choose_device() == DeviceChoice(device="cuda", gpu_name="NVIDIA H200")
    machine(T4, replace(H200, index=1))
    assert choose_device("auto") == DeviceChoice(device="cuda:1", gpu_name="NVIDIA H200")
    machine(H200, replace(H200, index=1), broken=(0,))
    assert choose_device().device == "cuda:1"
    assert choose_device("cpu") == DeviceChoice(device="cpu")


def test_without_a_gpu_auto_is_the_cpu_and_nothing_is_explained(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine(fault=GpuFault("torch is built without CUDA", "Install another."))
    assert resolve_config(EngineConfig())[1] == DeviceChoice(device="cpu")
    assert caplog.records == []


def test_a_gpu_that_cannot_be_used_is_explained(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine(T4)
    with caplog.at_level(logging.WARNING):
        config, choice = resolve_config(EngineConfig())
    assert config.device == choice.device == "cpu" and config.max_batch_tokens == 512
    assert choice.reason is not None
    assert "Tesla T4 has compute capability 7.5, and the kernels need 8.0" in choice.reason
    assert choice.reason in caplog.text
    machine(H200, triton="RuntimeError: Failed to find C compiler")
    reason = choose_device().reason
    assert reason is not None and "C compiler. Triton comes with" in reason


def test_a_named_gpu_that_cannot_be_used_is_an_error_with_the_fix(
    machine: Callable[..., None],
) -> None:
    machine(T4)
    with pytest.raises(InvalidRequest, match=r"cuda cannot be used: .*7\.5.* Or use") as caught:
        choose_device("cuda")
    assert caught.value.param == "device"
    machine(H200)
    with pytest.raises(InvalidRequest, match="cuda:3 cannot be used: there is no GPU with this"):
        choose_device("cuda:3")
    assert choose_device("cuda:0").device == "cuda"
    machine(H200, broken=(0,))
    with pytest.raises(InvalidRequest, match="no kernel image. Install another torch."):
        choose_device("cuda")
    machine(fault=GpuFault("no GPU is visible", "Start it with --gpus all."))
    with pytest.raises(InvalidRequest, match="no GPU is visible. Start it with --gpus all."):
        choose_device("cuda")


@pytest.mark.parametrize("kernels", ["cpu", "triton"])
def test_kernels_for_tests_keep_auto_on_the_cpu(
    kernels: str, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(H200)
    monkeypatch.setenv("LORAMUX_KERNELS", kernels)
    assert choose_device() == DeviceChoice(device="cpu")
    assert choose_device("cuda").device == "cuda"


def fault() -> GpuFault:
    found = visible_gpus()
    assert isinstance(found, GpuFault)
    return found


def test_what_torch_cannot_use_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in fault().reason
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "for ROCm" in fault().reason
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides all GPUs" in fault().reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nUpdate it.")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert fault().reason.endswith("The NVIDIA driver on your system is too old")
    assert "CUDA 12.8" in fault().fix
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert fault().reason == "no GPU is visible"


def test_a_gpu_is_present_if_its_device_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "gpus")
    (tmp_path / "nvidiactl").touch()
    assert not gpus.has_nvidia_gpu()
    (tmp_path / "nvidia0").touch()
    assert gpus.has_nvidia_gpu()


def test_triton_is_tried_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = pytest.importorskip("loramux.kernels.gpu.probe")
    assert select.triton_fault("cpu") is None
    monkeypatch.setattr(probe, "run_probe", lambda device: False)
    assert select.triton_fault("cpu") == "it computes wrong results"

    def fail(device: str) -> bool:
        raise OSError("Failed to find C compiler\nSet CC.")

    monkeypatch.setattr(probe, "run_probe", fail)
    assert select.triton_fault("cpu") == "OSError: Failed to find C compiler"
