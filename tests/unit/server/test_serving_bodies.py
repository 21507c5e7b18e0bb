"""Answers with a receipt are still OpenAI's answers."""

from __future__ import annotations

import msgspec

from loramux.server.serving_bodies import RunRequest, ServedChatChunk


def test_a_chunk_without_a_receipt_has_no_such_field() -> None:
    chunk = ServedChatChunk(id="x", created=1, model="m", choices=[])
    assert "serving" not in msgspec.to_builtins(chunk)


def test_a_run_takes_the_sampling_fields_of_the_other_routes() -> None:
    body = b'{"artifact": "a/b", "input": "x", "temperature": 0, "stream": true}'
    asked = msgspec.json.decode(body, type=RunRequest)
    assert (asked.artifact, asked.temperature, asked.stream, asked.raw) == ("a/b", 0, True, None)
