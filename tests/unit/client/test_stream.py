"""The reader by itself; broken streams over a socket are in test_client.py."""

from __future__ import annotations

import pytest
from httpx2 import ServerSentEvent

from loramux.client.errors import IncompleteStream
from loramux.client.replies import CompletionChunk
from loramux.client.stream import StreamReader

CHUNK = '{"id": "1", "model": "m", "choices": [{"index": 1, "text": "x", "finish_reason": "stop"}]}'


def test_an_empty_event_is_no_chunk_and_no_end() -> None:
    reader = StreamReader(CompletionChunk, num_choices=1)
    assert reader.read(ServerSentEvent(data="")) is None
    assert not reader.is_over


def test_the_choice_that_did_not_finish_is_named() -> None:
    reader = StreamReader(CompletionChunk, num_choices=2)
    assert reader.read(ServerSentEvent(data=CHUNK)) is not None
    with pytest.raises(IncompleteStream, match=r"\[DONE\]"):
        reader.check_complete()
    assert reader.read(ServerSentEvent(data="[DONE]")) is None
    with pytest.raises(IncompleteStream, match="choice 0"):
        reader.check_complete()
