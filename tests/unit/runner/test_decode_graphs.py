from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loramux.lora.graph_work import LoraKind
from loramux.runner.decode_graphs import BATCH_SIZES, DecodeLimits, is_decode
from loramux.types import Chunk, StepPlan
from tests.device_factory import decode, device_engine, lease, mixed_selections, row, two_adapters
from tests.engine_factory import make_prompt
from tests.model_factory import tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (5, [1, 2, 4, 5]), (999, list(BATCH_SIZES))])
def test_sizes_end_with_the_largest_batch_that_can_come(most: int, sizes: list[int]) -> None:
    assert DecodeLimits(max_sequences=most, max_pages=1).batch_sizes == sizes


def test_only_a_chunk_of_one_row_with_a_sample_is_a_decode() -> None:
    assert is_decode(Chunk(0, (1,), 3, [0], (), sample=row()))
    assert not is_decode(Chunk(0, (1,), 3, [0], (), sample=None))
    assert not is_decode(Chunk(0, (1, 2), 3, [0], (), sample=row()))
    assert not is_decode(Chunk(0, (1,), 0, [0], (), sample=row(), prompt_logprobs=0))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_decode_step_equals_the_same_rows_computed_one_by_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model(family)
    folders = two_adapters(model, tmp_path)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", max_sequences=6)
    selections = mixed_selections(engine, folders)[:5]
    lease(engine, *selections)
    last = engine.pages.num_pages - 1
    pages = [[last - 2 * i, last - 2 * i - 1] for i in range(len(selections))]
    lengths = [3, 17, 9, 16, 1]
    prompts = [
        Chunk(i, make_prompt(lengths[i], seed=i), 0, pages[i], selection, sample=None)
        for i, selection in enumerate(selections)
    ]
    runner.run(StepPlan(tuple(prompts)))
    # One is a padding row short of the size that fits.
    chunks = [decode(i, 40 + i, lengths[i], pages[i], s) for i, s in enumerate(selections)]
    result = runner.run(StepPlan(tuple(chunks)))
    order = sorted(chunks, key=lambda chunk: runner.directory.order(chunk.selection))
    graph_logits = runner._graphs._logits[: len(chunks)].clone()
    for place, chunk in enumerate(order):
        logits = runner.logits(StepPlan((chunk,)))[chunk.sequence_id][0]
        torch.testing.assert_close(graph_logits[place].float(), logits, atol=1e-4, rtol=1e-4)
        assert result.token_ids[chunk.sequence_id] == int(logits.argmax())


def test_rows_that_need_the_full_sampler_get_it_beside_those_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=4)[1]
    samples = [row(temperature=0.9), row(top_p=0.5, temperature=1.0), row(logprobs=1)]
    chunks = [Chunk(i, (8,), 0, [i], (), sample=sample) for i, sample in enumerate(samples)]
    together = runner.run(StepPlan(tuple(chunks)))
    apart = [runner._launch(StepPlan((chunk,)), has_lora=False).land() for chunk in chunks]
    assert together.token_ids == {i: result.token_ids[i] for i, result in enumerate(apart)}
    assert list(together.logprobs) == [2]


def test_capture_makes_every_size_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=3, max_batch_tokens=40)[1]
    told: list[float] = []
    runner.capture(lambda _, share: told.append(share))
    assert told == pytest.approx([number / 15 for number in range(1, 16)])
    assert set(runner._rows._steps) == {(n, kind) for n in (32, 40) for kind in LoraKind}
    assert set(runner._graphs._steps) == {(n, kind) for n in (1, 2, 3) for kind in LoraKind}
