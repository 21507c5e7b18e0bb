from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from loramux.engine.engine import Engine
from loramux.types.request import Selection
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, SampleRow, StepPlan, StepResult
from tests.chunk_factory import make_chunk
from tests.device_factory import lease, mixed_selections, reference_engine, two_adapters
from tests.engine_factory import cpu_runner, make_engine, make_prompt, run_step
from tests.memory_factory import InlineExecutor
from tests.model_factory import tiny_transformers_model

FAMILIES = ["llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "gemma2", "gemma3"]
FAMILIES += ["phi3", "granite", "smollm3", "olmo2", "glm4", "ministral"]


def sample_row(**params: object) -> SampleRow:
    settings = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return SampleRow(params=settings, seed=0, prompt_token_ids=(), output_token_ids=())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tiny_transformers_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("family", "reference"),
    [(family, False) for family in FAMILIES] + [("llama31", True), ("gemma3", True)],
)
def test_every_family_equals_transformers_with_paged_kv_in_any_chunks(
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
            piece = make_chunk(0, tokens[start:stop], start, [5, 1, 3], ())
            parts.append(engine.executor.logits(StepPlan((piece,)))[0])
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_only_chunks_with_a_sample_row_get_a_token(engine: Engine) -> None:
    first = make_chunk(4, (5, 6, 7), 0, [0], ())
    second = make_chunk(9, (5, 6), 0, [1], (), sample=sample_row(logprobs=1))
    result = run_step(engine, StepPlan((first, second)))
    assert list(result.accepted) == [9] and list(result.logprobs) == [9]
    logits = engine.executor.logits(StepPlan((second,)))[9]
    assert result.accepted[9] == [int(logits[-1].argmax())]


def test_prompt_logprobs_are_those_of_the_next_prompt_tokens(engine: Engine) -> None:
    tokens = make_prompt(6, seed=3)
    piece = make_chunk(
        1,
        tokens,
        0,
        [0],
        (),
        sample=sample_row(),
        following=tokens[1:],
    )
    result = run_step(engine, StepPlan((piece,)))
    logits = engine.executor.logits(StepPlan((piece,)))[1].log_softmax(-1)
    expected = [float(logits[i, token]) for i, token in enumerate(tokens[1:])]
    assert [entry.logprob for entry in result.logprobs[1]] == pytest.approx(expected, abs=1e-5)


def test_old_page_contents_never_reach_the_next_owner(engine: Engine) -> None:
    piece = make_chunk(0, make_prompt(5, seed=1), 0, [2], ())
    clean = engine.executor.logits(StepPlan((piece,)))[0]
    cpu_runner(engine).kv_pages.fill_(float("nan"))
    try:
        assert torch.equal(engine.executor.logits(StepPlan((piece,)))[0], clean)
    finally:
        cpu_runner(engine).kv_pages.zero_()


def mixed_steps(selections: list[Selection], last_page: int) -> list[StepPlan]:
    """Inner parts of prompts alone; then beside whole prompts; then ends of prompts and decodes."""
    prompts = [make_prompt(length, seed=length) for length in (3, 17, 9, 16, 1, 40)]

    def piece(i: int, start: int, stop: int) -> Chunk:
        tokens = (*prompts[i], 7)[start:stop]
        pages = [last_page - 3 * i - j for j in range(3)]
        row = sample_row(logprobs=2) if stop >= len(prompts[i]) else None
        return make_chunk(i, tokens, start, pages, selections[i], sample=row)

    cuts = [
        [(1, 0, 6), (3, 0, 5), (5, 0, 20)],
        [(0, 0, 3), (1, 6, 12), (2, 0, 9), (3, 5, 16), (4, 0, 1), (5, 20, 31)],
        [(0, 3, 4), (1, 12, 17), (2, 9, 10), (3, 16, 17), (4, 1, 2), (5, 31, 40)],
        [(i, len(prompts[i]), len(prompts[i]) + 1) for i in (5, 1)],
    ]
    return [StepPlan(tuple(piece(*cut) for cut in step)) for step in cuts]


def check_samples(plan: StepPlan, result: StepResult, logits: dict[int, Tensor]) -> None:
    sampled = {chunk.sequence_id for chunk in plan.chunks if chunk.num_sampled}
    assert result.accepted.keys() == result.logprobs.keys() == sampled
    for number in sampled:
        expected = logits[number][-1].log_softmax(-1)
        assert result.accepted[number] == [int(expected.argmax())]
        assert result.logprobs[number][-1].logprob == pytest.approx(float(expected.max()), abs=1e-4)


def test_a_mixed_batch_samples_by_the_logits_of_all_tokens(tmp_path: Path) -> None:
    """Base rows, adapters and compositions; what a step stored shows in the steps behind it."""
    model = tiny_transformers_model("llama")
    folders = two_adapters(model, tmp_path)
    engine = make_engine(model, tmp_path / "model", loads=InlineExecutor())
    oracle = reference_engine(model, tmp_path / "model")
    selections = mixed_selections(engine, folders)
    assert mixed_selections(oracle, folders) == selections
    lease(engine, *selections)
    lease(oracle, *selections)
    for plan in mixed_steps(selections, engine.pages.num_pages - 1):
        result = run_step(engine, plan)
        check_samples(plan, result, oracle.executor.logits(plan))
        check_samples(plan, result, engine.executor.logits(plan))
        assert run_step(engine, plan) == result


def test_prompt_logprobs_in_a_batch_with_other_requests(engine: Engine) -> None:
    tokens = make_prompt(9, seed=3)
    asks = make_chunk(
        1,
        tokens,
        0,
        [0],
        (),
        sample=sample_row(logprobs=0),
        following=tokens[1:],
    )
    other = make_chunk(2, make_prompt(12, seed=4), 0, [1], (), sample=sample_row(logprobs=0))
    inner = make_chunk(3, make_prompt(12, seed=5), 0, [2], ())
    plan = StepPlan((inner, asks, other))
    result, logits = run_step(engine, plan), engine.executor.logits(plan)
    check_samples(plan, result, logits)
    assert [len(result.logprobs[number]) for number in (1, 2)] == [9, 1]
    rows = logits[1].log_softmax(-1)
    expected = [float(rows[i, token]) for i, token in enumerate(tokens[1:])]
    found = [entry.logprob for entry in result.logprobs[1][:-1]]
    assert found == pytest.approx(expected, abs=1e-5)
