"""The engine computes without compiled CPU kernels, and changes to them between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.kernels import compile_ahead
from loramux.kernels.compile_ahead import CompileAhead
from loramux.models.packed_linear import PackedLinear
from loramux.runner.device_choice import resolve_config
from loramux.types.request import Request, Selection
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import (
    cpu_runner,
    make_prompt,
    make_request,
    run_all,
    save_model_with_tokenizer,
)

SETTINGS = {"device": "cpu", "device_memory_bytes": 8 * 2**20, "dtype": "float32"}
NUM_TOKENS = 24


def new_engine(folder: Path, ahead: CompileAhead | None) -> Engine:
    config, _ = resolve_config(EngineConfig(**SETTINGS))  # type: ignore[arg-type]
    model = load_base(folder, config, packs_later=ahead is not None)
    return build_engine(model, config, ahead=ahead)


def requests_of(engine: Engine, adapter: Path) -> list[Request]:
    cid = engine.register_adapter(adapter).cid
    selections: list[Selection] = [(), ((cid, 1.0),)]
    return [
        make_request(
            str(number), make_prompt(20 + number, seed=number), selection, max_tokens=NUM_TOKENS
        )
        for number, selection in enumerate(2 * selections)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = save_model_with_tokenizer(folder)
    make_peft_adapter(folder / "adapter", model, lora_alpha=32)
    return folder


@pytest.mark.parametrize("changes_at", [1, 5, 15])
def test_running_sequences_go_on_over_the_change_of_kernels(folder: Path, changes_at: int) -> None:
    """Sequences with and without adapters, in their prompts or after them."""
    whole = new_engine(folder, None)
    expected = run_all(whole, requests_of(whole, folder / "adapter"))
    ahead = CompileAhead()
    engine = new_engine(folder, ahead)
    decoder = cpu_runner(engine)._decoder
    linears = [module for module in decoder.modules() if isinstance(module, PackedLinear)]
    assert engine.executor.kernels == "cpu" and not any(one.is_packed for one in linears)
    assert not engine.prepare_next(), "nothing is compiled yet"
    for request in requests_of(engine, folder / "adapter"):
        engine.add(request)
    found: dict[str, list[int]] = {name: [] for name in expected}
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        if num_steps == changes_at:
            compile_ahead.compile_all()
            ahead.is_done = True
            assert engine.executor.is_lacking
        for event in engine.step():
            if event.token_id is not None:
                found[event.request_id].append(event.token_id)
        engine.check_integrity()
    assert num_steps > changes_at and engine.executor.kernels == "numba"
    engine.prepare_all()
    assert not engine.executor.is_lacking and all(one.is_packed for one in linears)
    assert found == expected
    for one in (whole, engine):
        one.close()


def test_logits_before_and_after_the_change_are_those_of_compiled_kernels(folder: Path) -> None:
    whole, ahead = new_engine(folder, None), CompileAhead()
    engine = new_engine(folder, ahead)
    cid = whole.register_adapter(folder / "adapter").cid
    assert engine.register_adapter(folder / "adapter").cid == cid
    prompts: list[tuple[tuple[int, ...], Selection]]
    prompts = [(make_prompt(9, seed=1), ()), (make_prompt(7, seed=2), ((cid, 1.0),))]
    expected = whole.prompt_logits(prompts)
    for got, right in zip(engine.prompt_logits(prompts), expected, strict=True):
        torch.testing.assert_close(got, right, atol=1e-4, rtol=0)
    compile_ahead.compile_all()
    ahead.is_done = True
    engine.prepare_all()
    for got, right in zip(engine.prompt_logits(prompts), expected, strict=True):
        torch.testing.assert_close(got, right, atol=1e-6, rtol=0)
    for one in (whole, engine):
        one.close()


def test_the_record_is_of_these_sources_on_this_machine_and_of_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ahead.compile_all()
    assert compile_ahead.are_compiled()
    monkeypatch.setattr(compile_ahead, "_cpu", lambda: "another CPU")
    assert not compile_ahead.are_compiled()
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not compile_ahead.are_compiled()
    lost = tmp_path / "lost.nbi"
    compile_ahead._record().write_text(f'["{lost}"]')
    assert not compile_ahead.are_compiled()
    lost.touch()
    assert compile_ahead.are_compiled()
