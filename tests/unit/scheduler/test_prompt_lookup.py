from __future__ import annotations

from typing import Any

import pytest

from loramux.config.speculative import SpeculativeConfig, parse_speculative_config
from loramux.errors import InvalidRequest
from loramux.scheduler.fairness import Client, Clients
from loramux.scheduler.prompt_lookup import PromptLookup
from loramux.scheduler.sequence import Sequence
from loramux.types.step import UNKNOWN_TOKEN
from tests.unit.scheduler.scheduler_factory import make_request


def sequence_of(prompt: list[int], outputs: list[int], **fields: object) -> Sequence:
    request = make_request("a", prompt, max_tokens=1000, **fields)
    clients = Clients(Client(), Client())
    sequence = Sequence(0, request, 0, max_length=2000, clients=clients, now=0.0)
    sequence.output_token_ids += outputs
    return sequence


def lookup(**settings: Any) -> PromptLookup:
    return PromptLookup(SpeculativeConfig(**{"prompt_lookup_min": 2, **settings}))


@pytest.mark.parametrize(
    ("prompt", "outputs", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], [2, 3], [4, 5, 6, 7]),
        ([1, 2, 3, 4], [9, 2], []),
        ([1, 2], [3, 9, 9, 1, 2], [3, 9, 9, 1]),
        # The last of two places.
        ([1, 2, 3, 1, 2, 4, 5], [1, 2], [4, 5, 1, 2]),
        # The longer match goes before the later place.
        ([8, 1, 2, 3, 7, 1, 2, 4], [8, 1, 2], [3, 7, 1, 2]),
        # A run repeats beyond the newest token.
        ([5, 6, 7], [5, 6, 7, 5, 6], [7, 5, 6, 7]),
        ([4, 4], [4], [4, 4, 4, 4]),
        ([1], [2], []),
    ],
)
def test_what_followed_the_newest_tokens_is_proposed(
    prompt: list[int], outputs: list[int], drafts: list[int]
) -> None:
    assert lookup().propose(sequence_of(prompt, outputs), 100) == drafts
    assert lookup().propose(sequence_of(prompt, outputs), 2) == drafts[:2]


def test_new_tokens_are_found_as_they_come() -> None:
    source, sequence = lookup(), sequence_of([1, 2, 3, 4], [])
    story = [5, 1, 2, 3, 4, 5, 1, 2]
    for token in story:
        sequence.output_token_ids.append(token)
        fresh = sequence_of([1, 2, 3, 4], list(sequence.output_token_ids))
        assert source.propose(sequence, 3) == lookup().propose(fresh, 3)


def test_a_match_before_the_token_in_flight_awaits_it() -> None:
    source = lookup()
    assert source.awaits(sequence_of([1, 2, 3, 4], [1, 2, UNKNOWN_TOKEN]))
    assert not source.awaits(sequence_of([1, 2, 3, 4], [1, 3, UNKNOWN_TOKEN]))
    sequence = sequence_of([1, 2, 3, 4], [1, 2, UNKNOWN_TOKEN])
    assert source.awaits(sequence)
    sequence.output_token_ids[-1] = 3
    assert source.propose(sequence, 8) == [4, 1, 2, 3]


def test_drafts_grow_while_they_are_accepted_and_pause_if_not() -> None:
    source, sequence = lookup(num_speculative_tokens=10), sequence_of([1, 2] * 30, [1, 2])
    sizes = []
    for accepted in (4, 8, 10, 3, 0):
        drafts = source.propose(sequence, 100)
        sizes.append(len(drafts))
        source.verified(sequence, num_drafts=len(drafts), num_accepted=accepted)
    assert sizes == [4, 8, 10, 10, 4]
    assert len(source.propose(sequence, 100)) == 2
    source.verified(sequence, num_drafts=2, num_accepted=0)
    quiet = 0
    while not source.propose(sequence, 100):
        assert not source.awaits(sequence)
        sequence.output_token_ids += [1, 2]
        quiet += 2
    assert quiet == 8
    assert (source.num_drafts, source.num_accepted) == ({"": 38}, {"": 25})


def test_a_request_has_fewer_drafts_or_none() -> None:
    source = lookup()
    few = sequence_of([1, 2] * 9, [1, 2], num_speculative_tokens=1)
    assert len(source.propose(few, 100)) == 1
    source.verified(few, num_drafts=1, num_accepted=1)
    assert len(source.propose(few, 100)) == 1
    none = sequence_of([1, 2] * 9, [1, 2], num_speculative_tokens=0)
    assert source.propose(none, 100) == [] and not source.awaits(none)


def test_counters_of_adapters_are_bounded() -> None:
    source = lookup()
    for number in range(300):
        sequence = sequence_of([1, 2] * 9, [1, 2], cid=f"cid{number}")
        drafts = source.propose(sequence, 2)
        source.verified(sequence, num_drafts=len(drafts), num_accepted=1)
    assert len(source.num_drafts) == 257 and source.num_drafts[""] == 2 * 44
    assert sum(source.num_accepted.values()) == 300


@pytest.mark.parametrize(
    "text",
    [
        "ngram",
        "[]",
        '{"method": "eagle3"}',
        '{"model": "x"}',
        '{"num_speculative_tokens": 0}',
        '{"num_speculative_tokens": "5"}',
        '{"prompt_lookup_min": 5, "prompt_lookup_max": 4}',
        '{"max_rows": 0}',
    ],
)
def test_what_speculative_config_cannot_be(text: str) -> None:
    with pytest.raises(InvalidRequest, match="speculative_config"):
        parse_speculative_config(text)


def test_the_form_of_vllm() -> None:
    text = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}'
    config = parse_speculative_config(text)
    assert (config.num_speculative_tokens, config.prompt_lookup_max) == (5, 4)
