from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loramux.runner.sampler_filters import drop_filtered
from loramux.types.sampling import SamplingParams
from tests.sampling_oracle import kept_by_transformers, random_logits, scaled_logits, token_set

VOCAB = 60
FILTERS = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 2.0),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 5)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)


def kept_sets(logits: Tensor, params: list[SamplingParams]) -> list[set[int]]:
    scaled = torch.stack([scaled_logits(row, p) for row, p in zip(logits, params, strict=True)])
    weights = scaled.exp()
    drop_filtered(weights, scaled, params)
    return [token_set(row > 0) for row in weights]


def top_p_by_sort(logits: Tensor, params: SamplingParams) -> set[int]:
    """Equal logits in the order of their ids."""
    order = logits.sort(descending=True, stable=True).indices
    mass = scaled_logits(logits, params).double().softmax(dim=-1)[order]
    return set(order[mass.cumsum(dim=-1) - mass < params.top_p].tolist())


@settings(max_examples=80)
@given(params=st.lists(FILTERS, min_size=1, max_size=4), seed=st.integers(0, 10_000))
def test_the_kept_set_is_that_of_transformers(params: list[SamplingParams], seed: int) -> None:
    """Catches a filter off by one token, in the wrong order, or of another row."""
    logits = random_logits(len(params), VOCAB, seed=seed, scale=1.5)
    expected = [kept_by_transformers(row, p) for row, p in zip(logits, params, strict=True)]
    assert kept_sets(logits, params) == expected


@pytest.mark.parametrize("temperature", [0.05, 1.0, 1e5])
@pytest.mark.parametrize("kind", ["plain", "rounded", "constant", "lonely", "deep", "forbidden"])
def test_top_p_finds_its_bucket_in_every_kind_of_row(kind: str, temperature: float) -> None:
    """Catches a histogram that loses tokens at its ends, or counts its padding."""
    logits = random_logits(1, 3000, seed=4)[0]
    match kind:
        case "rounded":
            logits = logits.round()
        case "constant":
            logits.fill_(2.0)
        case "lonely":
            logits.fill_(-50.0)[7] = 0.0
        case "deep":
            logits *= 40
        case "forbidden":
            logits[::2] = -torch.inf
    # Not a share that a whole number of equal tokens has, where rounding would decide.
    params = SamplingParams(temperature=temperature, top_p=0.7001)
    assert kept_sets(logits.unsqueeze(0), [params]) == [top_p_by_sort(logits, params)]


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.4}, {"top_k": 3, "top_p": 0.5}, {"top_k": 2, "min_p": 0.9}]
)
def test_of_equal_logits_the_first_ids_stay(params: dict[str, Any]) -> None:
    """Catches a kept set that grows with ties, and ties taken from a neighbour's row."""
    tied = torch.tensor([-9.0, 1.0, -9.0, 1.0, 1.0, 1.0])
    other = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    sampling = SamplingParams(**params)
    kept = kept_sets(
        torch.stack([other, tied, tied]), [SamplingParams(top_k=1), sampling, sampling]
    )
    assert kept == [{0}, {1, 3}, {1, 3}]


def test_min_p_alone_keeps_all_equal_ones() -> None:
    """Catches a tie rule that leaks into a filter which has no count."""
    logits = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    assert kept_sets(logits, [SamplingParams(min_p=1.0)]) == [{0, 1, 3}]
