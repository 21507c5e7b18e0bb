from __future__ import annotations

import msgspec

from loramux.client.replies import (
    AdapterInfo,
    ChatChunk,
    ChatReply,
    EngineInfo,
    ModelList,
    TierInfo,
    Usage,
)
from loramux.wire import text as wire


def test_a_newer_server_with_more_fields_is_still_read() -> None:
    body = (
        b'{"id": "1", "model": "m", "receipt": {"cid": "x"}, "choices": [{"index": 0, "new": 1, '
        b'"message": {"role": "assistant", "content": null, "tool_calls": []}, '
        b'"finish_reason": "stop"}], "usage": {"total_tokens": 3, "details": {}}}'
    )
    reply = msgspec.json.decode(body, type=ChatReply)
    assert reply.text == ""
    assert reply.usage is not None and reply.usage.total_tokens == 3


def test_text_is_that_of_the_first_choice() -> None:
    body = (
        b'{"id": "1", "model": "m", "choices": [{"index": 1, "delta": {"content": "b"}}, '
        b'{"index": 0, "delta": {"content": "a"}}]}'
    )
    assert msgspec.json.decode(body, type=ChatChunk).text == "a"


def test_a_card_without_a_parent_is_a_base() -> None:
    cards = msgspec.json.decode(
        b'{"data": [{"id": "m"}, {"id": "a", "parent": "m"}]}', type=ModelList
    )
    assert [card.is_adapter for card in cards.data] == [False, True]


def test_what_the_server_tells_of_adapters_and_engine_is_what_the_client_reads() -> None:
    """Catches a field that has one name here and another one there."""
    for read, written in (
        (AdapterInfo, wire.AdapterEntry),
        (TierInfo, wire.TierEntry),
        (EngineInfo, wire.EngineReport),
    ):
        # `replicas` is what a router adds.
        known = set(read.__struct_fields__) - {"replicas"}
        assert known == set(written.__struct_fields__) - {"object"}


def test_cached_tokens_are_read_from_any_server() -> None:
    for details, cached in (
        (b"", 0),
        (b', "prompt_tokens_details": null', 0),
        (b', "prompt_tokens_details": {"cached_tokens": null}', 0),
        (b', "prompt_tokens_details": {"audio_tokens": 0, "cached_tokens": 5}', 5),
    ):
        usage = msgspec.json.decode(b'{"prompt_tokens": 9' + details + b"}", type=Usage)
        assert usage.cached_tokens == cached
