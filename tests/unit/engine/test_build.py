from __future__ import annotations

from pathlib import Path

import pytest

from loramux.engine.build import build_engine, load_base
from loramux.errors import DoesNotFit, InvalidRequest
from loramux.runner.cpu_runner import CpuRunner
from tests.engine_factory import cpu_config, make_engine
from tests.model_factory import save_hf_folder, tiny_transformers_model

PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4


def test_the_pool_fills_its_budget_and_caps_the_context(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    engine = make_engine(model, tmp_path, device_memory_bytes=5 * PAGE_BYTES + 17)
    assert engine.pages.num_pages == 5
    assert engine.executor.pool_bytes == 5 * PAGE_BYTES
    assert engine.scheduler.config.max_model_len == 5 * 16


def test_max_model_len_is_capped_by_config_and_model(
    tmp_path: Path,
) -> None:
    model = tiny_transformers_model("llama")
    limits = [
        make_engine(model, tmp_path, max_model_len=asked).scheduler.config.max_model_len
        for asked in (None, 100, 9999)
    ]
    assert limits == [512, 100, 512]


def test_too_small_a_pool_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match=f"{PAGE_BYTES} bytes"):
        make_engine(tiny_transformers_model("llama"), tmp_path, device_memory_bytes=PAGE_BYTES)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="dtype must be one of"):
        make_engine(tiny_transformers_model("llama"), tmp_path, dtype="int3")


def test_progress_reports_the_preparation_of_kernels(tmp_path: Path) -> None:
    """The first start compiles for many seconds."""
    save_hf_folder(tiny_transformers_model("llama"), tmp_path)
    config = cpu_config(dtype="float32", device_memory_bytes=8 * 2**20)
    seen: list[str] = []
    build_engine(
        load_base(tmp_path, config), config, progress=lambda stage, _: seen.append(stage)
    ).close()
    assert "Preparing CPU kernels" in seen


def test_compilation_can_be_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_KERNELS", "cpu")
    runner = make_engine(tiny_transformers_model("llama"), tmp_path).executor
    assert isinstance(runner, CpuRunner) and runner._compiled is None
