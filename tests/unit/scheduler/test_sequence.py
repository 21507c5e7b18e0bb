from __future__ import annotations

import pytest

from loramux.scheduler.fairness import Client, Clients
from loramux.scheduler.sequence import Sequence
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams
from loramux.types.step import UNKNOWN_TOKEN, NextTokens, Rows, SampleRow


def make_sequence(**params: object) -> Sequence:
    request = Request(
        request_id="a",
        prompt_token_ids=(1, 2, 3, 4),
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )
    clients = Clients(Client(), Client())
    return Sequence(5, request, 0, max_length=64, clients=clients, now=0.0)


def test_a_chunk_runs_from_the_prompt_into_the_output_after_preemption() -> None:
    sequence = make_sequence()
    sequence.output_token_ids = [8, 9]
    assert list(sequence.chunk(6).token_ids) == [1, 2, 3, 4, 8, 9]
    sequence.num_computed = 3
    assert list(sequence.chunk(2).token_ids) == [4, 8]
    sequence.num_computed = 5
    assert list(sequence.chunk(1).token_ids) == [9] and sequence.is_decoding


def test_r16_a_chunk_ends_at_the_start_of_an_alora_and_is_the_bases_before() -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=(1, 2, 3, 4),
        params=SamplingParams(),
        selection=(("x", 1.0),),
        adapter_start=3,
    )
    sequence = Sequence(5, request, 0, max_length=64, clients=Clients(Client(), Client()), now=0.0)
    # It was preempted after two tokens.
    sequence.output_token_ids = [8, 9]
    found = []
    while sequence.num_uncomputed:
        chunk = sequence.chunk(min(2, sequence.num_in_chunk))
        found.append((chunk.start, list(chunk.token_ids), chunk.selection))
        sequence.num_computed += len(chunk.token_ids)
    own = request.selection
    assert found == [(0, [1, 2], ()), (2, [3], ()), (3, [4, 8], own), (5, [9], own)]


def test_prompt_logprobs_ask_for_the_token_that_truly_follows() -> None:
    sequence = make_sequence(prompt_logprobs=1)
    assert sequence.chunk(2).rows == (Rows(0, 2, NextTokens([2, 3], 1)),)
    sequence.num_computed = 2
    scored, sampled = sequence.chunk(2).rows
    assert scored == Rows(0, 1, NextTokens([4], 1))
    assert (sampled.start, sampled.count) == (1, 1) and isinstance(sampled.use, SampleRow)
    sequence.output_token_ids = [8]
    assert sequence.chunk(3).rows == (Rows(2, 1, sampled.use),)


def test_one_token_at_least_is_never_taken_from_the_cache() -> None:
    sequence = make_sequence()
    assert sequence.reusable_token_ids() == [1, 2, 3]
    sequence.output_token_ids = [8]
    assert sequence.reusable_token_ids() == [1, 2, 3, 4]


def test_prompt_logprobs_need_every_prompt_token_computed() -> None:
    sequence = make_sequence(prompt_logprobs=1)
    assert sequence.reusable_token_ids() == []
    sequence.output_token_ids = [8]
    assert sequence.reusable_token_ids() == [1, 2, 3, 4]


def test_a_restart_keeps_the_tokens_and_resets_the_wait() -> None:
    sequence = make_sequence()
    sequence.start(1.0)
    sequence.output_token_ids, sequence.num_computed, sequence.page_ids = [8], 4, [0]
    sequence.restart(3.0)
    assert (sequence.num_tokens, sequence.num_computed, sequence.page_ids) == (5, 0, [])
    assert (sequence.queued_s, sequence.started_s) == (3.0, None)


def test_r2_each_prompt_token_is_charged_once_and_reused_ones_never() -> None:
    """Catches a tenant that is charged again for tokens recomputed after a preemption."""
    sequence = make_sequence()
    client = sequence.clients.tenant
    sequence.num_computed = 1
    sequence.charge_prompt(2)
    assert client.counter == 2
    sequence.num_computed = 0
    sequence.charge_prompt(3)
    assert client.counter == 2
    sequence.num_computed = 3
    sequence.charge_prompt(2)
    assert client.counter == 3


def test_only_the_first_start_counts_reused_tokens() -> None:
    sequence = make_sequence()
    sequence.num_computed = 2
    sequence.start(1.0)
    sequence.restart(2.0)
    sequence.num_computed = 3
    sequence.start(3.0)
    assert sequence.num_reused_tokens == 2


@pytest.mark.parametrize(("now", "limits"), [(2.9, (10.0, 4.0)), (3.0, (19.0, 13.0))])
def test_r11_a_slot_is_protected_for_a_while_by_the_counters_at_the_start(
    now: float, limits: tuple[float, float]
) -> None:
    sequence = make_sequence()
    sequence.clients.tenant.counter, sequence.clients.adapter.counter = 10.0, 4.0
    sequence.start(1.0)
    sequence.clients.charge(9.0)
    limit = sequence.preemption_limit(now, 2.0)
    assert (limit.tenant_limit, limit.adapter_limit) == limits


def test_a_token_in_flight_is_unknown() -> None:
    sequence = make_sequence(max_tokens=2)
    assert not sequence.has_unknown and not sequence.is_full
    sequence.output_token_ids = [8, UNKNOWN_TOKEN]
    assert sequence.has_unknown and sequence.is_full
    assert (sequence.num_tokens, sequence.num_known_outputs) == (6, 1)
    # What comes from the cache ends before it.
    assert sequence.reusable_token_ids() == [1, 2, 3, 4, 8]


def test_the_chunk_of_a_decode_is_that_of_one_token() -> None:
    """Catches a shortcut with another position or without a sample."""
    sequence = make_sequence()
    sequence.output_token_ids += [8, UNKNOWN_TOKEN]
    sequence.num_computed, sequence.page_ids = 5, [3, 4]
    assert sequence.is_decoding
    assert sequence.decode_chunk() == sequence.chunk(1)
    assert sequence.decode_chunk().page_ids is sequence.page_ids
