from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference.sampling import NO_TOKEN
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.step import UNKNOWN_TOKEN, Chunk
from tests.chunk_factory import make_chunk


def chunk(sequence_id: int, *token_ids: int) -> Chunk:
    return make_chunk(sequence_id, token_ids, 0, [0], ())


def filled(*sequence_ids: int) -> TokenBuffer:
    """Sequence n has the token 100 + n."""
    token_buffer = TokenBuffer(torch.zeros(2 * 4, dtype=torch.int32))
    token_buffer.store(torch.tensor([100 + n for n in sequence_ids]))
    token_buffer.publish(sequence_ids)
    return token_buffer


def test_an_unknown_token_is_written_after_the_known_tokens_of_its_sequence() -> None:
    token_buffer = filled(8, 9)
    chunks = [chunk(9, 1, 2, UNKNOWN_TOKEN), chunk(3, 4), chunk(8, UNKNOWN_TOKEN)]
    token_ids = torch.tensor([1, 2, -1, 4, -1])
    token_buffer.fill_in(chunks, [0, 3, 4], token_ids)
    assert token_ids.tolist() == [1, 2, 109, 4, 108]


def test_two_in_flight_steps_keep_their_own_tokens() -> None:
    token_buffer = filled(1)
    first = token_buffer.publish([1])
    token_buffer.store(torch.tensor([55]))
    second = token_buffer.publish([1])
    assert (first.result().accepted, second.result().accepted) == ({1: [101]}, {1: [55]})


def test_a_row_without_a_valid_token_has_its_mark_on_the_host_alone() -> None:
    token_buffer = filled()
    token_buffer.store(torch.tensor([5, 6 + NO_TOKEN, 7]))
    step = token_buffer.publish([1, 2, 3])
    token_ids = torch.full((3,), UNKNOWN_TOKEN)
    token_buffer.fill_in([chunk(n, UNKNOWN_TOKEN) for n in (1, 2, 3)], [0, 1, 2], token_ids)
    assert token_ids.tolist() == [5, 6, 7]
    assert list(step.result().failed) == [2]


def test_known_tokens_are_not_read_from_the_buffer() -> None:
    token_buffer = filled(1)
    token_buffer.forget()
    assert token_buffer.place(chunk(1, 5)) is None
    with pytest.raises(KeyError):
        token_buffer.place(chunk(1, UNKNOWN_TOKEN))
