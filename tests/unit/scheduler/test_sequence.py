from __future__ import annotations

from loramux.scheduler.sequence import Sequence
from loramux.types import Request, SamplingParams


def make_sequence(**params: object) -> Sequence:
    request = Request(
        request_id="a",
        prompt_token_ids=(1, 2, 3, 4),
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )
    return Sequence(5, request, 0, max_length=64)


def test_a_chunk_runs_from_the_prompt_into_the_output_after_preemption() -> None:
    sequence = make_sequence()
    sequence.output_token_ids = [8, 9]
    assert list(sequence.chunk(6).token_ids) == [1, 2, 3, 4, 8, 9]
    sequence.num_computed = 3
    assert list(sequence.chunk(2).token_ids) == [4, 8]
    sequence.num_computed = 5
    assert list(sequence.chunk(1).token_ids) == [9] and sequence.is_decoding


def test_prompt_logprobs_ask_for_the_token_that_truly_follows() -> None:
    sequence = make_sequence(prompt_logprobs=1)
    assert list(sequence.chunk(2).next_prompt_token_ids) == [2, 3]
    sequence.num_computed = 2
    assert list(sequence.chunk(2).next_prompt_token_ids) == [4]
    sequence.output_token_ids = [8]
    assert sequence.chunk(3).prompt_logprobs is None


def test_restart_keeps_the_tokens_and_forgets_the_pages() -> None:
    sequence = make_sequence()
    sequence.output_token_ids, sequence.num_computed, sequence.page_ids = [8], 4, [0]
    sequence.restart()
    assert (sequence.num_tokens, sequence.num_computed, sequence.page_ids) == (5, 0, [])
