"""POST /v1/responses with the openai package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.scripted_backend import CARD, ScriptedBackend, named
from tests.unit.server.test_openai_client import with_client
from tests.unit.server.test_streaming import dies_after_two

PATH = "/v1/responses"


def test_a_text_and_its_answer() -> None:
    backend = ScriptedBackend()
    answer = with_client(
        lambda client: client.responses.create(
            model="legal", input="hi", instructions="be", max_output_tokens=20, store=False
        ),
        backend,
    )
    assert (answer.output_text, answer.status, answer.model) == ("Hello you", "completed", "legal")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (12, 9)
    assert backend.cids == [named("legal").cid]
    assert bytes(backend.requests[0].prompt_token_ids) == b"s:be\nu:hi\na:"


def test_items_become_messages() -> None:
    backend = ScriptedBackend()
    backend.card = replace(CARD, max_model_len=200)
    items: Any = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "42"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
    ]
    assert post(make_app(backend), PATH, {"input": items}).status_code == 200
    assert bytes(backend.requests[0].prompt_token_ids) == (
        b's:be\nu:hi\na:{"tool_call": {"name": "f", "arguments": {}}}\n'
        b'u:{"tool_result": {"content": "42"}}\na:ok\na:'
    )


def test_a_cut_answer_is_incomplete() -> None:
    answer = post(make_app(), PATH, {"input": "hi", "max_output_tokens": 2}).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"] == "He"


def test_events_of_a_stream_are_numbered() -> None:
    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.responses.create(model="legal", input="hi", stream=True)
        return [event async for event in stream]

    events = with_client(work)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(one.delta for one in events if one.type.endswith("text.delta")) == "Hello you"
    assert events[-1].response.output_text == "Hello you"


def test_a_stream_that_breaks_says_that_it_failed() -> None:
    text = post(
        make_app(ScriptedBackend(dies_after_two)), PATH, {"input": "x", "stream": True}
    ).text
    assert text.count("event: response.failed") == 1 and "response.completed" not in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "function", "name": "f x"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": "b"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"grammar": "x"}, "grammar"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
    ],
)
def test_what_is_not_kept_or_supported_is_refused(fields: Any, param: str) -> None:
    response = post(make_app(), PATH, {"input": "hi"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_harmless_fields_are_accepted() -> None:
    fields = {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": []}
    assert post(make_app(), PATH, {"input": "hi", "store": True} | fields).status_code == 200
