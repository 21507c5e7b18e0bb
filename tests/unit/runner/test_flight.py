from __future__ import annotations

import torch

from loramux.runner.in_flight import Landed, TokensInFlight
from loramux.types.step import StepResult


def test_tokens_go_to_their_sequences_in_order_and_stay_when_the_buffer_is_used_again() -> None:
    host = torch.tensor([41, 42, 43], dtype=torch.int32)
    flight = TokensInFlight([7, 5], host, None)
    assert not flight.is_over
    assert flight.land().token_ids == {7: 41, 5: 42}
    host.zero_()
    assert flight.land().token_ids == {7: 41, 5: 42}


def test_a_result_that_is_there_has_landed() -> None:
    result = StepResult({1: 2})
    assert Landed(result).is_over and Landed(result).land() is result
