from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from loramux.errors import InvalidRequest
from loramux.runner.penalties import adjust_logits, check_logit_bias
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow

VOCAB = 23
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def adjusted(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
) -> torch.Tensor:
    result = logits.clone()
    adjust_logits(
        result, SampleRow(params, seed=0, prompt_token_ids=prompt, output_token_ids=output)
    )
    return result


@settings(max_examples=40)
@given(prompt=TOKENS, output=TOKENS, penalty=st.floats(0.5, 2.0), seed=st.integers(0, 999))
def test_repetition_penalty_counts_prompt_and_output_once_as_transformers_does(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    """Catches a penalty applied twice to a token that came twice, or with the wrong sign."""
    seen = [*prompt, *output] or [0]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([seen]), logits.unsqueeze(0).clone()
    )[0]
    params = SamplingParams(repetition_penalty=penalty)
    actual = adjusted(logits, params, seen[: len(prompt)], seen[len(prompt) :])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_frequency_and_presence_count_the_output_only() -> None:
    """Catches a prompt that is punished, or a presence that grows with the count."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    change = adjusted(torch.zeros(5), params, [0, 0, 1], [1, 2, 2])
    assert change.tolist() == [0.0, -1.5, -2.0, 0.0, 0.0]


def test_before_the_first_token_only_the_prompt_counts() -> None:
    """Catches a failure on an empty output."""
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    assert adjusted(torch.ones(3), params, [1], []).tolist() == [1.0, 0.5, 1.0]


def test_logit_bias_is_added_before_the_penalties() -> None:
    """Catches a bias that escapes the repetition penalty, unlike the other servers."""
    params = SamplingParams(logit_bias={1: 5.0, 2: -5.0}, repetition_penalty=2.0)
    assert adjusted(torch.ones(4), params, [1, 2], []).tolist() == [1.0, 3.0, -8.0, 1.0]


@pytest.mark.parametrize("token_id", [-1, 8])
def test_a_bias_outside_the_vocabulary_is_refused(token_id: int) -> None:
    """Catches an id that would wrap around, or fail a batch that others share."""
    with pytest.raises(InvalidRequest, match="0 to 7") as refusal:
        check_logit_bias(SamplingParams(logit_bias={token_id: 1.0}), 8)
    assert refusal.value.param == "logit_bias"
    check_logit_bias(SamplingParams(logit_bias={7: 1.0}), 8)
