from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from loramux.config.engine import EngineConfig, SchedulerConfig
from loramux.config.fields import parse_bytes
from loramux.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", 512),
        (7, 7),
        ("2GiB", 2 * 2**30),
        ("1.5 GB", 3 * 2**29),
        ("64m", 64 * 2**20),
        ("8KiB", 8192),
        ("1T", 2**40),
    ],
)
def test_sizes_are_parsed_in_every_spelling(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1 PB", "1e9", "GiB"])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest, match="512MiB"):
        parse_bytes(text)


COUNTS = [f.name for f in dataclasses.fields(SchedulerConfig) if f.type in ("int", "int | None")]


@pytest.mark.parametrize("name", COUNTS)
def test_zero_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SchedulerConfig(**{name: 0})


def test_an_unknown_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_adaptors"):
        EngineConfig(max_adaptors=3)  # type: ignore[call-arg]


def test_the_environment_can_force_the_reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    assert not EngineConfig().wants_reference_kernels
    assert EngineConfig(reference_kernels=True).wants_reference_kernels
    monkeypatch.setenv("LORAMUX_KERNELS", "torch")
    assert EngineConfig().wants_reference_kernels


def test_the_environment_can_forbid_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    assert EngineConfig().may_compile_kernels
    monkeypatch.setenv("LORAMUX_KERNELS", "cpu")
    config = EngineConfig()
    assert not (config.may_compile_kernels or config.wants_reference_kernels)
    assert not config.resolve("cpu", available_bytes=0).wants_device_kernels


def test_a_gpu_runs_gpu_kernels_and_refuses_merge_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAMUX_KERNELS", raising=False)
    config = EngineConfig(merge="auto")
    assert EngineConfig().resolve("cuda:1", available_bytes=0).wants_device_kernels
    assert not config.resolve("cpu", available_bytes=0).wants_device_kernels
    reference = EngineConfig(reference_kernels=True).resolve("cuda", available_bytes=0)
    assert not reference.wants_device_kernels
    with pytest.raises(InvalidRequest, match="works on a CPU only"):
        EngineConfig(device="cuda", merge="auto")
    with pytest.raises(InvalidRequest, match="works on a CPU only"):
        config.resolve("cuda", available_bytes=0)


def test_auto_follows_the_device_and_a_given_value_stays() -> None:
    on_gpu = EngineConfig().resolve("cuda", available_bytes=2**35)
    assert (on_gpu.device, on_gpu.max_batch_tokens, on_gpu.max_sequences) == ("cuda", 2048, 256)
    assert on_gpu.host_memory_bytes == 2**33
    on_cpu = EngineConfig().resolve("cpu", available_bytes=2**35)
    assert (on_cpu.device, on_cpu.max_batch_tokens, on_cpu.max_sequences) == ("cpu", 512, 256)
    assert on_cpu.host_memory_bytes == 2**30
    given = EngineConfig(max_batch_tokens=7, max_sequences=3, host_memory_bytes=0, block_tokens=8)
    resolved = given.resolve("cuda", available_bytes=2**35)
    assert (resolved.max_batch_tokens, resolved.max_sequences) == (7, 3)
    assert (resolved.host_memory_bytes, resolved.block_tokens) == (0, 8)
    assert replace(resolved, max_sequences=4).max_sequences == 4


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "tpu", "cpu:0", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(InvalidRequest, match="auto, cpu, cuda or cuda:N"):
        EngineConfig(device=device)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_an_invalid_fraction_of_the_gpu_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


@pytest.mark.parametrize("ranks", [-16, 8, 100])
def test_augmented_ranks_are_a_multiple_of_the_rank_block(ranks: int) -> None:
    with pytest.raises(InvalidRequest, match="multiple of 16"):
        EngineConfig(lora_augmented_ranks=ranks)
    assert EngineConfig(lora_augmented_ranks=0).lora_augmented_ranks == 0
