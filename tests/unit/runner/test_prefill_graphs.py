from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.lora.graph_lora import LoraMode
from loramux.runner.prefill_graphs import TOKEN_COUNTS, token_counts
from loramux.types.step import StepPlan
from tests.adapter_factory import ATTENTION
from tests.chunk_factory import make_chunk
from tests.device_factory import (
    ALL_LINEAR,
    decode,
    device_engine,
    lease,
    mixed_selections,
    row,
    two_adapters,
)
from tests.engine_factory import make_prompt
from tests.lora_factory import (
    AUGMENTED,
    AUGMENTED_ATTENTION,
    AUGMENTED_NARROW,
    LORA_MODES,
    SEGMENTED,
    SEGMENTED_ATTENTION,
)
from tests.model_factory import tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")

AUGMENTED_RANKS = {AUGMENTED: 128, AUGMENTED_ATTENTION: 128, AUGMENTED_NARROW: 256}
OF_ATTENTION = (SEGMENTED_ATTENTION, AUGMENTED_ATTENTION)


@pytest.mark.parametrize(("most", "counts"), [(7, [7]), (64, [32, 64]), (9999, list(TOKEN_COUNTS))])
def test_token_counts_end_with_the_largest_possible_step(most: int, counts: list[int]) -> None:
    assert token_counts(most) == counts


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(
            pytest.param("llama", mode, marks=pytest.mark.slow if mode in OF_ATTENTION else ())
            for mode in LORA_MODES
        ),
        ("gemma3", AUGMENTED),
        pytest.param("gemma3", SEGMENTED, marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode_in_one_step_equal_separate_steps(
    family: str, mode: LoraMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model(family)
    places = ATTENTION if mode in OF_ATTENTION else ALL_LINEAR
    folders = two_adapters(model, tmp_path, places=places)
    settings: dict[str, Any] = {"max_sequences": 6, "max_batch_tokens": 40}
    settings["lora_augmented_ranks"] = AUGMENTED_RANKS.get(mode, 0)
    engine, runner = device_engine(monkeypatch, model, tmp_path / "model", **settings)
    selections = mixed_selections(engine, folders)
    lease(engine, *selections)
    last = engine.pages.num_pages - 1
    pages = [[last - 2 * i, last - 2 * i - 1] for i in range(len(selections))]
    before = [3, 17, 9, 16, 2, 7]
    for i, selection in enumerate(selections):
        prompt = make_chunk(i, make_prompt(before[i], seed=i), 0, pages[i], selection)
        runner.logits(StepPlan((prompt,)))
    chunks = [
        decode(0, 41, before[0], pages[0], selections[0]),
        make_chunk(1, make_prompt(12, seed=8), before[1], pages[1], selections[1], sample=row()),
        decode(2, 42, before[2], pages[2], selections[2]),
        make_chunk(3, make_prompt(9, seed=9), before[3], pages[3], selections[3]),
        make_chunk(4, make_prompt(2, seed=7), before[4], pages[4], selections[4], sample=row()),
        decode(5, 43, before[5], pages[5], selections[5]),
    ]
    if mode in AUGMENTED_RANKS:
        # An adapter is brought to the tail when it is asked for again.
        runner.run(StepPlan(tuple(chunks)))
    result = runner.run(StepPlan(tuple(chunks)))
    (launch,) = runner.trace()
    assert (launch.kind, launch.key) == ("prefill", (32, mode))
    for chunk in (chunk for chunk in chunks if chunk.num_sampled):
        logits = runner.logits(StepPlan((chunk,)))[chunk.sequence_id][-1]
        found = launch.logits[chunk.sequence_id].float()
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
        assert result.accepted[chunk.sequence_id] == [int(logits.argmax())]
    assert 3 not in result.accepted


def test_a_step_that_fits_no_graph_runs_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    settings: dict[str, Any] = {"max_sequences": 2, "max_batch_tokens": 40}
    runner = device_engine(monkeypatch, model, tmp_path, **settings)[1]
    plan = StepPlan((make_chunk(0, make_prompt(30, seed=1), 0, [0, 1], (), sample=row()),))
    expected = runner.run(plan)
    assert [launch.kind for launch in runner.trace()] == ["prefill"]
    monkeypatch.setattr(runner.prefill_graphs, "_has_room", lambda *_: False)
    assert runner.run(plan).accepted == expected.accepted
    assert [launch.kind for launch in runner.trace()] == [None]
