from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loramux.runner.sampler_candidates import draw_among_best, inverse_cdf, kept_prefix
from loramux.types.sampling import SamplingParams
from tests.sampling_oracle import kept_by_transformers, random_logits, scaled_logits

VOCAB = 60
COMB = 200


def comb(logits: Tensor, params: SamplingParams, count: int) -> list[int]:
    """Draws on the same logits [vocab] with noise that goes evenly from 0 to 1."""
    noise = torch.arange(COMB, dtype=torch.float64).unsqueeze(1) / COMB
    total = None
    if params.top_k <= 0:
        total = scaled_logits(logits, params).double().exp().sum().expand(COMB, 1)
    rows = logits.expand(COMB, -1)
    return draw_among_best(rows, [params] * COMB, noise, total, count).tolist()


@settings(max_examples=60)
@given(
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0.2, 2.0),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
        top_k=st.integers(1, VOCAB + 5),
        min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    ),
    seed=st.integers(0, 10_000),
)
def test_the_kept_prefix_is_that_of_transformers(params: SamplingParams, seed: int) -> None:
    """Catches a filter off by one token, or a top_p of more than top_k leaves."""
    logits = random_logits(1, VOCAB, seed=seed, scale=1.5)
    ranked = scaled_logits(logits, params).sort(dim=-1, descending=True)
    kept = int(kept_prefix(ranked.values, [params], None))
    assert set(ranked.indices[0, :kept].tolist()) == kept_by_transformers(logits[0], params)


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "min_p": 0.2}])
def test_noise_walks_the_kept_tokens_in_the_order_of_the_vocabulary(
    params: dict[str, Any],
) -> None:
    """Catches draws in the order of likelihood, which differ from those over all tokens."""
    logits = random_logits(1, VOCAB, seed=1, scale=1)[0]
    sampling = SamplingParams(**params)
    tokens = comb(logits, sampling, 30)
    assert tokens == sorted(tokens)
    assert set(tokens) == kept_by_transformers(logits, sampling)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.5}])
def test_of_equal_logits_the_first_ids_stay(params: dict[str, Any]) -> None:
    """Catches a set that is left to how torch.topk breaks ties."""
    logits = torch.tensor([-9.0, 1.0, -9.0, 1.0, 1.0, 1.0, 1.0])
    sampling = SamplingParams(**params)
    assert set(comb(logits, sampling, 4 if sampling.top_k > 0 else 6)) == {1, 3}


def test_too_few_candidates_are_reported_and_not_drawn_from() -> None:
    """Catches a top_p that is silently cut at the number of candidates."""
    params = SamplingParams(top_p=0.9)
    assert set(comb(torch.zeros(VOCAB), params, 20)) == {-1}
    assert set(comb(torch.zeros(VOCAB), params, 2 * VOCAB)) == set(range(54))


def test_rows_that_are_not_numbers_are_reported() -> None:
    """Catches a token taken from a row that overflowed, as if it were a good one."""
    rows = torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, 1.0, 2.0], [0.0, 9.0, 0.0]])
    noise = torch.full((3, 1), 0.5, dtype=torch.float64)
    drawn = draw_among_best(rows, [SamplingParams(top_k=2)] * 3, noise, None, 3)
    assert drawn.tolist() == [-1, -1, 1]


def test_a_step_up_at_a_weight_of_zero_is_not_a_token() -> None:
    """Catches a rounding that ends before, behind or past the tokens with weight."""
    weights = torch.tensor([[0.0, 1.0, 0.0]])
    for noise in (0.0, 0.5, 1.0):
        assert inverse_cdf(weights, torch.tensor([[noise]], dtype=torch.double)).item() == 1
