from __future__ import annotations

import pytest
import torch

from loramux.runner.token_buffer import TokenBuffer
from loramux.types.step import UNKNOWN_TOKEN, Chunk


def chunk(sequence_id: int, *token_ids: int) -> Chunk:
    return Chunk(sequence_id, token_ids, 0, [0], (), sample=None)


def filled(*sequence_ids: int) -> TokenBuffer:
    """Sequence n has the token 100 + n."""
    feed = TokenBuffer(torch.zeros(4, dtype=torch.int32))
    feed.take(torch.tensor([100 + n for n in sequence_ids]))
    feed.publish(sequence_ids)
    return feed


def test_an_unknown_token_is_written_behind_the_known_ones_of_its_own_sequence() -> None:
    feed = filled(8, 9)
    chunks = [chunk(9, 1, 2, UNKNOWN_TOKEN), chunk(3, 4), chunk(8, UNKNOWN_TOKEN)]
    token_ids = torch.tensor([1, 2, -1, 4, -1])
    feed.fill_in(chunks, [0, 3, 4], token_ids)
    assert token_ids.tolist() == [1, 2, 109, 4, 108]


def test_two_steps_can_be_on_their_way_and_each_lands_with_its_own_tokens() -> None:
    feed = filled(1)
    first = feed.publish([1])
    feed.take(torch.tensor([55]))
    second = feed.publish([1])
    assert (first.result().token_ids, second.result().token_ids) == ({1: [101]}, {1: [55]})


def test_nobody_reads_a_token_that_is_on_the_host_already() -> None:
    feed = filled(1)
    feed.forget()
    assert feed.place(chunk(1, 5)) is None
    with pytest.raises(KeyError):
        feed.place(chunk(1, UNKNOWN_TOKEN))
