"""The decoder over compiled loops, against the plain one on reference kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loramux.runner.runner import Runner
from loramux.types import Chunk, StepPlan
from tests.device_factory import lease, mixed_selections, reference_engine, two_adapters
from tests.engine_factory import make_engine, make_prompt
from tests.memory_factory import InlineExecutor
from tests.model_factory import tiny_transformers_model

pytest.importorskip("numba", reason="no numba on this machine")

FAMILIES = ["llama31", "qwen2", "qwen3", "gemma2", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_the_decoder_in_any_chunks(family: str, tmp_path: Path) -> None:
    """Biases, norms of heads, norms after, windows with their own rope, softcaps, tied heads."""
    model = tiny_transformers_model(family)
    tokens = make_prompt(20, seed=2)
    whole = StepPlan((Chunk(0, tokens, 0, [5, 1], (), sample=None),))
    expected = reference_engine(model, tmp_path).runner.logits(whole)[0]
    runner = make_engine(model, tmp_path, loads=InlineExecutor()).runner
    assert isinstance(runner, Runner) and runner._compiled is not None
    parts = []
    for start, stop in ((0, 15), (15, 19), (19, 20)):
        piece = Chunk(0, tokens[start:stop], start, [5, 1], (), sample=None)
        parts.append(runner.logits(StepPlan((piece,)))[0])
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_rows_of_several_adapters_equal_the_decoder(tmp_path: Path) -> None:
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
                Chunk(i, prompt, 0, [last - 3 * i - j for j in range(3)], selection, sample=None)
                for i, (prompt, selection) in enumerate(zip(prompts, selections, strict=True))
            )
        )
        found.append(engine.runner.logits(plan))
    for number, expected in found[0].items():
        torch.testing.assert_close(found[1][number], expected, atol=1e-4, rtol=1e-4)
