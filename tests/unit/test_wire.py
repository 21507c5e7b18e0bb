"""Bodies that travel: optional fields are absent or null where clients expect it."""

from __future__ import annotations

import msgspec

from loramux.server import wire


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
