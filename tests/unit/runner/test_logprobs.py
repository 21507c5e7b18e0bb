from __future__ import annotations

import math

import pytest
import torch

from loramux.runner.logprobs import ROWS_AT_ONCE, token_logprobs


def test_logprobs_and_ranks_are_those_of_log_softmax() -> None:
    """Catches a wrong normalizer or rank, also behind the first slice of rows."""
    rows = ROWS_AT_ONCE + 3
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(1)) * 4
    chosen = [7 * i % 50 for i in range(rows)]
    expected = logits.log_softmax(dim=-1)
    order = logits.argsort(dim=-1, descending=True)
    for i, found in enumerate(token_logprobs(logits, chosen, 4)):
        assert found.token_id == chosen[i]
        assert found.logprob == pytest.approx(float(expected[i, chosen[i]]), abs=1e-5)
        assert found.rank == order[i].tolist().index(chosen[i]) + 1
        assert [token_id for token_id, _ in found.top] == order[i, :4].tolist()
        for token_id, logprob in found.top:
            assert logprob == pytest.approx(float(expected[i, token_id]), abs=1e-5)


def test_without_alternatives_only_the_token_is_described() -> None:
    """Catches `logprobs=0` that reports one alternative, or none at all."""
    (found,) = token_logprobs(torch.tensor([[0.0, 1.0]]), [0], 0)
    assert found.top == ()
    assert found.rank == 2


def test_equal_logits_are_listed_by_id_as_argmax_takes_them() -> None:
    """Catches a best alternative that is not the token which greedy decoding took."""
    logits = torch.tensor([[0.0] + [2.0, 3.0] * 40])
    (found,) = token_logprobs(logits, [2], 3)
    assert [token_id for token_id, _ in found.top] == [2, 4, 6]
    assert found.rank == 1


def test_more_alternatives_than_tokens_is_the_whole_vocabulary() -> None:
    """Catches a topk that asks for more than there is."""
    (found,) = token_logprobs(torch.tensor([[0.0, 1.0]]), [0], 5)
    assert [token_id for token_id, _ in found.top] == [1, 0]
    assert math.exp(found.top[0][1]) + math.exp(found.logprob) == pytest.approx(1)


def test_rows_and_tokens_must_pair() -> None:
    """Catches a silent cut where a chunk and its next tokens differ in length."""
    with pytest.raises(ValueError, match="2 rows"):
        token_logprobs(torch.zeros(2, 3), [1], 0)
