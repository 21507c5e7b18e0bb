from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.runner import sampler
from loramux.runner.logprobs import token_logprobs
from loramux.runner.sampler import sample, uniform
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow
from tests.sampling_oracle import chi_square, kept_by_transformers, random_logits

VOCAB = 37

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1]),
    top_k=st.sampled_from([0, -1, 1, 3, 20, 500]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 5: -100.0}]),
    logprobs=st.sampled_from([None, 0, 3]),
)
ROWS = st.builds(
    SampleRow,
    params=PARAMS,
    seed=st.integers(-(2**70), 2**70),
    prompt_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    output_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=4),
)


def row(params: SamplingParams, seed: int = 0, step: int = 0) -> SampleRow:
    return SampleRow(params, seed, prompt_token_ids=(), output_token_ids=[0] * step)


def drawn(logits: torch.Tensor, params: SamplingParams, draws: int) -> Counter[int]:
    """Tokens of many seeds on the same logits [vocab]."""
    rows = [row(params, seed) for seed in range(draws)]
    return Counter(sample(logits.expand(draws, -1), rows).token_ids)


@settings(max_examples=60)
@given(rows=st.lists(ROWS, min_size=1, max_size=6), data=st.data())
def test_a_row_alone_or_in_any_company_gives_the_same_token(
    rows: list[SampleRow], data: st.DataObject
) -> None:
    """Catches noise or filters that leak between rows, and results handed to the wrong row."""
    logits = random_logits(len(rows), VOCAB, seed=data.draw(st.integers(0, 99)))
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[torch.tensor(order)], [rows[i] for i in order])
    assert shuffled.token_ids == [together.token_ids[i] for i in order]
    for i, single in enumerate(rows):
        alone = sample(logits[i : i + 1], [single])
        assert alone.token_ids == [together.token_ids[i]]
        described = together.logprobs[i]
        assert (described is None) == (single.params.logprobs is None)
        if described is not None:
            assert described.token_id == together.token_ids[i]


def test_a_large_mixed_batch_equals_each_row_alone() -> None:
    """Catches a dependence on the batch that shows only at real sizes, past one slice of rows."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 9.0},
        {"top_k": 50},
        {"top_k": 3, "min_p": 0.1},
        {"min_p": 0.02},
        {"top_k": 2000, "top_p": 0.5},
    ]
    rows = [row(SamplingParams(**kinds[i % len(kinds)]), seed=i) for i in range(80)]
    rows += [row(SamplingParams(), seed=i) for i in range(70)]
    logits = random_logits(len(rows), 5000, seed=5)
    together = sample(logits, rows).token_ids
    assert together == [sample(logits[i : i + 1], [r]).token_ids[0] for i, r in enumerate(rows)]


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.4}, {"top_k": 2, "top_p": 0.99}])
@pytest.mark.parametrize("limit", [0, 1024])
def test_of_equal_logits_the_first_ids_stay(
    params: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a kept set that is too large, or left to how torch.topk breaks ties."""
    monkeypatch.setattr(sampler, "MAX_CANDIDATES", limit)
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 1 if limit == 0 else 256)
    logits = torch.tensor([-9.0, 1.0, -9.0, 1.0, 1.0, 1.0])
    assert set(drawn(logits, SamplingParams(**params), 200)) == {1, 3}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_k": 5, "top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 2, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_noise_never_leave_the_kept_set(
    params: dict[str, Any], noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rounding at u = 0 or u = 1 that returns a forbidden token or one past the end."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, step: noise)
    logits = random_logits(20, VOCAB, seed=8)
    logits[:, 0] = -math.inf
    logits[:, -1] = -math.inf
    sampling = SamplingParams(**params)
    for i, token_id in enumerate(sample(logits, [row(sampling)] * 20).token_ids):
        assert token_id in kept_by_transformers(logits[i], sampling)


@settings(max_examples=30)
@given(temperature=st.sampled_from([1e-3, 1e-8, 1e-40, 5e-324]), seed=st.integers(0, 99))
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.2}])
def test_a_temperature_near_zero_is_greedy(
    params: dict[str, Any], temperature: float, seed: int
) -> None:
    """Catches an overflow, or 0 / 0, where the temperature vanishes in float32."""
    logits = random_logits(4, VOCAB, seed=seed)
    rows = [row(SamplingParams(temperature=temperature, **params), seed)] * 4
    assert sample(logits, rows).token_ids == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_greedy_takes_the_first_of_equal_best_tokens(params: dict[str, Any]) -> None:
    """Catches a maximum that is not argmax."""
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0]]).repeat(3, 1)
    rows = [row(SamplingParams(**params), seed) for seed in range(3)]
    assert sample(logits, rows).token_ids == [1, 1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}])
def test_a_row_that_overflowed_does_not_touch_its_neighbours(
    bad: float, params: dict[str, Any]
) -> None:
    """Catches one NaN that fails, or changes, the whole batch."""
    logits = random_logits(3, VOCAB, seed=2)
    rows = [row(SamplingParams(**params), seed) for seed in range(3)]
    expected = sample(logits, rows).token_ids
    logits[1] = bad
    found = sample(logits, rows).token_ids
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert 0 <= found[1] < VOCAB


def test_noise_is_a_pure_function_of_seed_and_step() -> None:
    """Catches a change of the mixer, which would change every seeded answer."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == [
        0.8833108082136426,
        0.43152799704850997,
        0.7497482413580301,
    ]
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


@pytest.mark.parametrize("by_step", [True, False])
def test_noise_is_uniform_over_seeds_and_over_steps(by_step: bool) -> None:
    """Catches a mixer that leaves neighbours alike."""
    numbers = [uniform(7, i) if by_step else uniform(i, 7) for i in range(8000)]
    counts = Counter(int(number * 16) for number in numbers)
    pairs = Counter(
        (int(a * 4), int(b * 4)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)
    )
    # 15 degrees of freedom: above 37.7 once in a thousand.
    assert chi_square([counts[i] for i in range(16)], [500] * 16) < 37.7
    cells = [(a, b) for a in range(4) for b in range(4)]
    assert chi_square([pairs[cell] for cell in cells], [250] * 16) < 37.7


@pytest.mark.parametrize("params", [{}, {"top_p": 0.999}, {"top_k": 8}, {"min_p": 1e-6}])
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Catches a temperature applied twice, or a bias towards an end of the vocabulary."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4, 0.9, 0.1, -0.7])
    counts = drawn(logits, SamplingParams(temperature=0.7, **params), 6000)
    expected = ((logits / 0.7).softmax(dim=-1) * 6000).tolist()
    # 7 degrees of freedom: above 24.3 once in a thousand.
    assert chi_square([counts[i] for i in range(8)], expected) < 24.3


def test_logprobs_are_of_the_raw_logits() -> None:
    """Catches logprobs taken after bias, penalties or temperature."""
    logits = random_logits(1, VOCAB, seed=9)
    worst = int(logits.argmin())
    params = SamplingParams(temperature=0.1, logit_bias={worst: 100.0}, logprobs=2)
    output = sample(logits, [row(params)])
    assert output.token_ids == [worst]
    assert output.logprobs == token_logprobs(logits, [worst], 2)
    assert output.logprobs[0] is not None
    assert output.logprobs[0].rank == VOCAB


def test_rows_and_logits_must_pair() -> None:
    """Catches tokens that would go to the wrong request."""
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample(torch.zeros(2, 3), [row(SamplingParams())])
