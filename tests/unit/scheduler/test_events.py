from __future__ import annotations

from loramux.scheduler.events import end_event, error_event, timeout_event, token_event
from loramux.scheduler.fairness import Client, Clients
from loramux.scheduler.sequence import Sequence
from loramux.types.request import FinishReason, TokenLogprob
from tests.unit.scheduler.scheduler_factory import make_request


def make_sequence(**fields: object) -> Sequence:
    clients = Clients(Client(), Client())
    request = make_request("a", 3, **fields)
    return Sequence(5, request, 1, max_length=64, clients=clients, now=0.0)


def test_the_first_token_alone_brings_what_is_said_once() -> None:
    sequence = make_sequence()
    sequence.num_reused_tokens = 8
    sequence.prompt_logprobs = [TokenLogprob(1, -0.5, 1)]
    sequence.output_token_ids = [7]
    first = token_event(sequence, 7, None)
    assert (first.index, first.num_reused, first.prompt_logprobs) == (
        1,
        8,
        sequence.prompt_logprobs,
    )
    sequence.output_token_ids = [7, 7]
    second = token_event(sequence, 7, FinishReason.STOP)
    assert (second.num_reused, second.prompt_logprobs, second.stop_token_id) == (0, None, 7)


def test_a_prompt_alone_reports_its_reuse() -> None:
    sequence = make_sequence(max_tokens=0)
    sequence.num_reused_tokens = 8
    event = end_event(sequence)
    assert (event.token_id, event.finish_reason, event.num_reused) == (None, "length", 8)
    sequence.output_token_ids = [7]
    assert end_event(sequence).num_reused == 0


def test_errors_say_which_kind_they_are() -> None:
    event = error_event(make_sequence(), "adapter", "It is broken.")
    assert (event.finish_reason, event.error_code, event.error) == (
        FinishReason.ERROR,
        "adapter",
        "It is broken.",
    )


def test_a_timeout_says_how_far_the_request_came() -> None:
    sequence = make_sequence(timeout_s=30.0, max_tokens=64)
    event = timeout_event(sequence)
    assert event.error is not None and "still waiting" in event.error
    sequence.start(1.0)
    sequence.output_token_ids = [7] * 12
    event = timeout_event(sequence)
    assert event.error is not None and event.error_code == "timeout"
    assert "timed out after 30 s: 12 of 64 tokens were made" in event.error
