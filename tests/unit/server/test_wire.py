"""JSON bodies: optional fields are absent or null where clients expect it."""

from __future__ import annotations

import msgspec

from loramux.registry.names import AdapterName
from loramux.registry.records import AdapterInfo, AliasAction, AliasState, Target, VersionInfo
from loramux.server.live.lists import registry_entry
from loramux.wire import text as wire
from loramux.wire.text import ChatChunk, RunRequest


def encoded(value: msgspec.Struct) -> object:
    return msgspec.json.decode(msgspec.json.encode(value))


def test_chunk_leaves_out_what_it_does_not_have() -> None:
    """A null role or usage is not the same as none: clients concatenate what they find."""
    choice = wire.ChatChunkChoice(index=0, delta=wire.ChatDelta(content="a"))
    chunk = wire.ChatChunk(id="x", created=1, model="m", choices=[choice])
    assert encoded(chunk) == {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "system_fingerprint": None,
        "choices": [
            {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
        ],
    }


def test_every_body_survives_the_way_there_and_back() -> None:
    details = wire.PromptTokensDetails(cached_tokens=1)
    usage = wire.Usage(
        prompt_tokens=1, completion_tokens=2, total_tokens=3, prompt_tokens_details=details
    )
    choice = wire.CompletionChoice(index=0, text="a", finish_reason="stop", stop_reason=None)
    whole = wire.Completion(id="x", created=1, model="m", choices=[choice], usage=usage)
    assert msgspec.json.decode(msgspec.json.encode(whole), type=wire.Completion) == whole


def test_logit_bias_keys_are_strings_in_json_and_numbers_here() -> None:
    body = b'{"prompt": "a", "logit_bias": {"5": -1}}'
    decoded = msgspec.json.decode(body, type=wire.CompletionRequest)
    assert decoded.logit_bias == {5: -1.0}
    assert msgspec.json.decode(msgspec.json.encode(decoded))["logit_bias"] == {"5": -1.0}


def test_a_chunk_without_a_receipt_has_no_such_field() -> None:
    chunk = ChatChunk(id="x", created=1, model="m", choices=[])
    assert "serving" not in msgspec.to_builtins(chunk)


def test_a_run_takes_the_sampling_fields_of_the_other_routes() -> None:
    body = b'{"artifact": "a/b", "input": "x", "temperature": 0, "stream": true}'
    asked = msgspec.json.decode(body, type=RunRequest)
    assert (asked.artifact, asked.temperature, asked.stream, asked.raw) == ("a/b", 0, True, None)


def test_an_adapter_is_shown_with_its_versions_and_shares() -> None:
    name = AdapterName("acme", "sql")
    version = VersionInfo(
        adapter=name, version="1.0.0", cid="c", size_bytes=5, base_model="b", created_at=1.0
    )
    state = AliasState(
        alias="prod",
        revision=2,
        action=AliasAction.SPLIT,
        targets=(Target("1.0.0", 90), Target("1.1.0", 10)),
        created_at=2.0,
    )
    info = AdapterInfo(
        adapter=name, latest="1.0.0", versions=(version,), aliases=(state,), revision=3
    )
    entry = registry_entry(info)
    assert entry.id == "acme/sql" and entry.versions[0].bytes == 5
    assert entry.aliases[0].targets == {"1.0.0": 90, "1.1.0": 10}
    assert entry.aliases[0].action == "split"
