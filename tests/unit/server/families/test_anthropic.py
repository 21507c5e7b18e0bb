"""Anthropic's routes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.scripted_backend import CARD, ScriptedBackend, named
from tests.unit.server.test_streaming import dies_after_two

MESSAGES = [{"role": "user", "content": "hi"}]


def create(app: Any, **fields: Any) -> Any:
    return post(app, "/v1/messages", {"messages": MESSAGES, "max_tokens": 20} | fields)


def test_a_message_and_its_answer() -> None:
    backend = ScriptedBackend()
    answer = create(
        make_app(backend), model="legal", system=[{"type": "text", "text": "be"}]
    ).json()
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "legal")
    assert answer["content"] == [{"type": "text", "text": "Hello you"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["input_tokens"] == 12 and answer["usage"]["output_tokens"] == 9
    assert backend.cids == [named("legal").cid]
    assert bytes(backend.requests[0].prompt_token_ids) == b"s:be\nu:hi\na:"


def test_blocks_of_tools_and_thinking_become_messages() -> None:
    backend = ScriptedBackend()
    backend.card = replace(CARD, max_model_len=200)
    tool = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "text", "text": "42"}],
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "?"}, tool]},
        {"role": "user", "content": [result, {"type": "text", "text": "so"}]},
    ]
    assert create(make_app(backend), messages=messages).status_code == 200
    call, said = '{"tool_call": {"name": "f", "arguments": {"x": 1}}}', '"content": "42"'
    written = f'u:hi\na:{call}\nu:{{"tool_result": {{{said}}}}}\nu:so\na:'
    assert bytes(backend.requests[0].prompt_token_ids).decode() == written


def test_why_it_stopped() -> None:
    assert create(make_app(), max_tokens=2).json()["stop_reason"] == "max_tokens"


def test_events_of_a_stream() -> None:
    blocks = create(make_app(), stream=True).text.removesuffix("\n\n").split("\n\n")
    names, events = zip(*(block.split("\ndata: ", 1) for block in blocks), strict=True)
    events = [json.loads(event) for event in events]
    assert [name.removeprefix("event: ") for name in names] == [one["type"] for one in events]
    assert [one["type"] for one in events] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(one["delta"]["text"] for one in events[2:5]) == "Hello you"
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] == 9


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    text = create(make_app(ScriptedBackend(dies_after_two)), stream=True).text
    assert "event: error" in text and "message_stop" not in text


def test_tokens_are_counted_without_generating() -> None:
    backend = ScriptedBackend()
    answer = post(make_app(backend), "/v1/messages/count_tokens", {"messages": MESSAGES})
    assert answer.json() == {"input_tokens": 7} and backend.requests == []


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "nope"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"tools": [{"name": "f x", "input_schema": {}}]}, 400, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400,
         "invalid_request_error"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "all"}}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"tool_choice": "any"}, 400, "invalid_request_error"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "invalid_request_error"),
        ({"system": [5]}, 400, "invalid_request_error"),
        ({"adapter_id": "x"}, 400, "invalid_request_error"),
    ],
)  # fmt: skip
def test_errors_have_a_type(fields: Any, status: int, kind: str) -> None:
    response = create(make_app(), **fields)
    assert response.status_code == status, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)


def test_a_too_long_prompt_is_said_in_the_words_of_the_api() -> None:
    response = create(make_app(), messages=[{"role": "user", "content": "x" * 70}])
    assert response.json()["error"]["message"].startswith("prompt is too long")
