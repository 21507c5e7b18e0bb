from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loramux.engine.engine import Engine
from loramux.types import Chunk, SampleRow, SamplingParams, StepPlan
from tests.engine_factory import make_engine, make_prompt
from tests.model_factory import tiny_transformers_model

FAMILIES = ["llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "gemma2", "gemma3"]


def sample_row(**params: object) -> SampleRow:
    settings = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return SampleRow(params=settings, seed=0, prompt_token_ids=(), output_token_ids=())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tiny_transformers_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reference", [False, True], ids=["fast", "reference"])
def test_every_family_equals_transformers_through_pages_in_any_chunks(
    family: str, reference: bool, tmp_path: Path
) -> None:
    model = tiny_transformers_model(family)
    engine = make_engine(model, tmp_path, reference_kernels=reference)
    tokens = make_prompt(37, seed=2)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    for cuts in ([0, 37], [0, 20, 21, 37], list(range(38))):
        parts = []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            piece = Chunk(0, tokens[start:stop], start, [5, 1, 3], (), sample=None)
            parts.append(engine.runner.logits(StepPlan((piece,)))[0])
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_only_chunks_with_a_sample_row_get_a_token(engine: Engine) -> None:
    first = Chunk(4, (5, 6, 7), 0, [0], (), sample=None)
    second = Chunk(9, (5, 6), 0, [1], (), sample=sample_row(logprobs=1))
    result = engine.runner.run(StepPlan((first, second)))
    assert list(result.token_ids) == [9] and list(result.logprobs) == [9]
    logits = engine.runner.logits(StepPlan((second,)))[9]
    assert result.token_ids[9] == int(logits[-1].argmax())


def test_prompt_logprobs_are_those_of_the_tokens_that_follow(engine: Engine) -> None:
    tokens = make_prompt(6, seed=3)
    piece = Chunk(
        1,
        tokens,
        0,
        [0],
        (),
        sample=sample_row(),
        prompt_logprobs=0,
        next_prompt_token_ids=tokens[1:],
    )
    result = engine.runner.run(StepPlan((piece,)))
    logits = engine.runner.logits(StepPlan((piece,)))[1].log_softmax(-1)
    expected = [float(logits[i, token]) for i, token in enumerate(tokens[1:])]
    assert [entry.logprob for entry in result.prompt_logprobs[1]] == pytest.approx(
        expected, abs=1e-5
    )


def test_what_a_page_held_before_never_reaches_its_next_owner(engine: Engine) -> None:
    piece = Chunk(0, make_prompt(5, seed=1), 0, [2], (), sample=None)
    clean = engine.runner.logits(StepPlan((piece,)))[0]
    engine.runner._pool.storage.fill_(float("nan"))
    try:
        assert torch.equal(engine.runner.logits(StepPlan((piece,)))[0], clean)
    finally:
        engine.runner._pool.storage.zero_()
