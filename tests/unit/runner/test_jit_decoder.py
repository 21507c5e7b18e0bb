"""The decoder over compiled loops, against the plain one on reference kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.runner.batch import build_batch
from loramux.runner.cpu_runner import CpuRunner
from loramux.runner.jit_decoder import JitDecoder
from loramux.types.step import StepPlan
from tests.chunk_factory import make_chunk
from tests.device_factory import lease, mixed_selections, reference_engine, row, two_adapters
from tests.engine_factory import make_engine, make_prompt
from tests.memory_factory import InlineExecutor
from tests.model_factory import tiny_transformers_model
from tests.unit.lora.test_merge import build, source_of

pytest.importorskip("numba", reason="no numba on this machine")

OP_FAMILIES = ["llama31", "qwen2", "qwen3", "gemma2", "gemma3"]
OP_FAMILIES += ["phi4_mini", "granite", "smollm3", "olmo2", "glm4"]


@pytest.mark.parametrize("family", OP_FAMILIES)
def test_every_family_equals_the_reference_in_any_chunks(family: str, tmp_path: Path) -> None:
    """Covers biases, head norms, sandwich norms, windows with their own rope, softcaps."""
    model = tiny_transformers_model(family)
    tokens = make_prompt(20, seed=2)
    whole = StepPlan((make_chunk(0, tokens, 0, [5, 1], ()),))
    expected = reference_engine(model, tmp_path).executor.logits(whole)[0]
    runner = make_engine(model, tmp_path, loads=InlineExecutor()).executor
    assert isinstance(runner, CpuRunner) and runner._compiled is not None
    parts = []
    for start, stop in ((0, 15), (15, 19), (19, 20)):
        piece = make_chunk(0, tokens[start:stop], start, [5, 1], ())
        parts.append(runner.logits(StepPlan((piece,)))[0])
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_tokens_of_several_adapters_equal_the_reference(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    folders = two_adapters(model, tmp_path)
    prompts = [make_prompt(length, seed=length) for length in (3, 17, 9, 16, 1, 40)]
    found = []
    for engine in (
        reference_engine(model, tmp_path / "model"),
        make_engine(model, tmp_path / "model", loads=InlineExecutor()),
    ):
        selections = mixed_selections(engine, folders)
        lease(engine, *selections)
        last = engine.pages.num_pages - 1
        plan = StepPlan(
            tuple(
                make_chunk(i, prompt, 0, [last - 3 * i - j for j in range(3)], selection)
                for i, (prompt, selection) in enumerate(zip(prompts, selections, strict=True))
            )
        )
        found.append(engine.executor.logits(plan))
    for number, expected in found[0].items():
        torch.testing.assert_close(found[1][number], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", OP_FAMILIES)
@torch.inference_mode()
def test_selected_tokens_equal_those_of_a_full_forward_and_all_kv_is_stored(
    family: str, tmp_path: Path
) -> None:
    runner = make_engine(tiny_transformers_model(family), tmp_path).executor
    assert isinstance(runner, CpuRunner) and runner._compiled is not None
    storage = runner.kv_pages
    batch = build_batch(
        [make_chunk(i, make_prompt(20, seed=i), 0, [5 + i, 1 + i], ()) for i in range(2)],
        storage.device,
    )

    def hidden(rows: list[int] | None) -> Tensor:
        storage.zero_()
        return runner._compiled.hidden(batch.token_ids, batch.positions, batch.sequences, rows)

    expected, stored = hidden(None), storage.clone()
    for rows in ([39, 4, 11], [19], []):
        found = hidden(rows)
        assert found.shape == (len(rows), expected.shape[1])
        torch.testing.assert_close(found, expected[rows], atol=1e-5, rtol=1e-5)
        assert torch.equal(storage, stored)


def test_a_step_computes_the_sampled_tokens_and_logits_computes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_engine(tiny_transformers_model("llama"), tmp_path).executor
    num_rows, hidden = [], JitDecoder.hidden

    def count(*args: Any) -> Tensor:
        found = hidden(*args)
        num_rows.append(len(found))
        return found

    monkeypatch.setattr(JitDecoder, "hidden", count)
    prompt = make_prompt(12, seed=1)
    inner = make_chunk(0, prompt, 0, [0], ())
    sampled = make_chunk(1, prompt, 0, [1], (), sample=row())
    runner.run(StepPlan((inner, sampled)))
    runner.run(StepPlan((inner,)))
    runner.logits(StepPlan((inner, sampled)))
    asks = make_chunk(2, prompt, 0, [2], (), row(), following=prompt[1:])
    runner.run(StepPlan((inner, asks)))
    assert num_rows == [1, 0, 24, 12]


def test_merged_weights_equal_the_adapter_for_selected_tokens(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    folder = two_adapters(model, tmp_path)[1]
    engine = make_engine(model, tmp_path / "model", loads=InlineExecutor())
    selection = ((engine.register_adapter(folder).cid, 1.0),)
    lease(engine, selection)
    runner, last = engine.executor, engine.pages.num_pages - 1
    assert isinstance(runner, CpuRunner)
    chunks = [
        make_chunk(i, make_prompt(9, seed=i), 0, [last - i], selection, sample=row(logprobs=0))
        for i in range(3)
    ]
    expected = runner.run(StepPlan(tuple(chunks)))
    runner.lora.merged = build(source_of(engine), selection).sites
    found = runner.run(StepPlan(tuple(chunks)))
    assert found.accepted == expected.accepted
    for number, (entry,) in expected.logprobs.items():
        assert found.logprobs[number][0].logprob == pytest.approx(entry.logprob, abs=1e-4)
