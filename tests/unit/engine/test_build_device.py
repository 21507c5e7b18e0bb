from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.build import load_base
from loramux.engine.build_device import (
    GpuExecutors,
    largest_step,
    measured_pool_bytes,
    warm_up_steps,
)
from loramux.errors import DoesNotFit
from loramux.models.architectures import base_info
from loramux.runner.gpu_runner import BatchLimits
from loramux.types.kv import KVLayout
from tests.device_factory import device_engine, two_adapters
from tests.engine_factory import cpu_config, make_prompt, make_request, run_all
from tests.model_factory import save_hf_folder, tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")


LIMITS = BatchLimits(max_batch_tokens=20, max_sequences=3, max_pages=4)
BLOCK = 16


@pytest.fixture
def executors(tmp_path: Path) -> GpuExecutors:
    save_hf_folder(tiny_transformers_model("llama", num_hidden_layers=1), tmp_path)
    model = load_base(tmp_path, cpu_config(dtype="float32", pack_weights=False))
    kv = KVLayout(num_layers=1, num_kv_heads=2, head_dim=16, block_tokens=BLOCK)
    return GpuExecutors(
        model=model,
        linears=base_info(model.config, "tiny").linears,
        kv=kv,
        page_bytes=kv.page_bytes,
        limits=LIMITS,
        device=torch.device("cpu"),
    )


def test_the_directory_follows_loads_and_evictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    folders = two_adapters(model, tmp_path)
    settings: dict[str, Any] = {"max_active_adapters": 1, "max_sequences": 2}
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **settings)
    cids = [engine.register_adapter(folder).cid for folder in folders]
    for cid, other in (cids, reversed(cids)):
        run_all(engine, [make_request("one", make_prompt(4, seed=1), ((cid, 1.0),), max_tokens=1)])
        assert cid in runner.directory and other not in runner.directory
    assert engine.forget_adapter(cids[0])
    assert cids[0] not in runner.directory


def test_resident_adapters_are_capped_by_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine, runner = device_engine(
        monkeypatch, model, tmp_path, max_sequences=2, device_memory_bytes=2**16
    )
    assert engine.residency.limits.max_adapters == runner.directory.max_adapters
    assert runner.directory.max_adapters == engine.pages.num_pages


def test_the_largest_step_has_all_tokens_and_samples(executors: GpuExecutors) -> None:
    step = largest_step(LIMITS, BLOCK)
    assert step.num_tokens == 20 and len(step.chunks) == 3
    assert all(chunk.num_sampled for chunk in step.chunks)
    pages = [page for chunk in step.chunks for page in chunk.page_ids]
    assert len(set(pages)) == len(pages) <= executors.pages_of_step
    runner = executors.make(executors.pages_of_step)
    assert len(runner.run(step).accepted) == 3


def test_warm_up_steps_stay_within_the_limits(executors: GpuExecutors) -> None:
    steps = warm_up_steps(LIMITS, BLOCK, num_pages=16)
    for step in steps:
        assert step.num_tokens <= LIMITS.max_batch_tokens + LIMITS.max_sequences
        assert all(len(chunk.page_ids) <= LIMITS.max_pages for chunk in step.chunks)
        assert max(page for chunk in step.chunks for page in chunk.page_ids) < 16
    starts = {chunk.start for step in steps for chunk in step.chunks}
    assert len(starts) > 1, "some have a past"
    executors.make(16).warm_up(steps[:2])


def test_too_little_memory_is_refused_with_the_numbers(executors: GpuExecutors) -> None:
    config = cpu_config(gpu_memory_utilization=1e-6, max_batch_tokens=20)
    told: list[str] = []
    with pytest.raises(DoesNotFit, match=r"MiB are taken.*max_batch_tokens \(20\)"):
        measured_pool_bytes(executors, config, progress=lambda what, _: told.append(what))
    assert told == ["Measuring memory"]


def test_running_out_of_memory_while_measuring_is_refused(
    executors: GpuExecutors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(GpuExecutors, "make", fail)
    with pytest.raises(DoesNotFit, match="need more than is left"):
        measured_pool_bytes(executors, cpu_config())
