"""Tools through the chat route: definitions, replies, streams and turns."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loramux.backend.text import Delta
from loramux.types.grammar import Grammar
from loramux.types.request import FinishReason, Request
from tests.unit.server.asgi_client import CHAT, chat, events_of, make_app, post
from tests.unit.server.scripted_backend import ByteCodec, ScriptedBackend, delta

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class HermesCodec(ByteCodec):
    """Has a template of the Hermes format, and keeps what it was given."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.tools: Any = None

    def tokenizer_info(self) -> dict[str, Any]:
        return {"chat_template": "{% if tools %}<tool_call>{% endif %}"}

    def added_token_id(self, text: str) -> int | None:
        return None

    def apply_chat_template(self, messages: Any, **arguments: Any) -> list[int]:
        self.messages, self.tools = list(messages), arguments.get("tools")
        return [97, 98]


def says(*pieces: str, finish: FinishReason = FinishReason.STOP) -> Any:
    async def script(request: Request) -> AsyncIterator[Delta]:
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            for index in range(request.params.n):
                yield delta(request, index, piece.encode(), finish if is_last else None)

    return script


def backend_saying(*pieces: str, **settings: Any) -> ScriptedBackend:
    backend = ScriptedBackend(says(*pieces, **settings))
    backend.codec = HermesCodec()
    return backend


def test_a_complete_reply_has_calls_and_no_content() -> None:
    backend = backend_saying("\n", CALL[:20], CALL[20:])
    reply = chat(make_app(backend), tools=[WEATHER]).json()["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    assert reply["message"]["content"] is None
    (call,) = reply["message"]["tool_calls"]
    assert call["id"].startswith("call_") and len(call["id"]) == 29
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    params = backend.requests[0].params
    assert params.grammar is not None and not params.skip_special_tokens
    assert backend.codec.tools == [WEATHER]


def test_text_before_calls_is_content_and_text_alone_is_no_call() -> None:
    reply = chat(make_app(backend_saying("Hm. " + CALL)), tools=[WEATHER]).json()["choices"][0]
    assert reply["message"]["content"] == "Hm. " and len(reply["message"]["tool_calls"]) == 1
    plain = chat(make_app(backend_saying("Hello")), tools=[WEATHER]).json()["choices"][0]
    assert plain["message"] == {"role": "assistant", "content": "Hello"}
    assert plain["finish_reason"] == "stop"


def test_a_call_that_is_cut_ends_by_length() -> None:
    cut = backend_saying(CALL[:55], finish=FinishReason.LENGTH)
    reply = chat(make_app(cut), tools=[WEATHER]).json()["choices"][0]
    assert reply["finish_reason"] == "length"
    assert reply["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def test_a_stream_has_the_deltas_that_clients_join() -> None:
    app = make_app(backend_saying("Hm", ". ", *CALL, "\n" + CALL))
    events = events_of(chat(app, tools=[WEATHER], stream=True).text)
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == "Hm. "
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    begins = [call for call in deltas if "id" in call]
    assert [call["index"] for call in begins] == [0, 1]
    assert all(call["function"] == {"name": "weather", "arguments": ""} for call in begins)
    for index in (0, 1):
        parts = [c["function"]["arguments"] for c in deltas if c["index"] == index]
        assert "".join(parts) == '{"city": "Rome"}' and len(parts) > 1
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)


def test_logprobs_of_a_stream_with_calls_are_complete() -> None:
    app = make_app(backend_saying(*CALL))
    events = events_of(chat(app, tools=[WEATHER], stream=True, logprobs=True).text)
    shown = [
        token["token"]
        for event in events[:-1]
        for choice in event["choices"]
        for token in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(shown) == CALL


def test_each_choice_has_its_own_calls() -> None:
    reply = chat(make_app(backend_saying(*CALL)), tools=[WEATHER], n=2).json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in reply["choices"]]
    assert len(set(ids)) == 2


def test_choices_of_tools() -> None:
    def lark(**fields: Any) -> str:
        backend = backend_saying("x")
        response = chat(make_app(backend), tools=[WEATHER], **fields)
        assert response.status_code == 200, response.text
        text = backend.requests[0].params.grammar
        return "" if text is None else Grammar.decode(text).text

    assert lark() == lark(tool_choice="auto") and "text" in lark()
    required = lark(tool_choice="required")
    assert "text" not in required and "call)*" in required
    named = lark(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert "call)*" not in named
    assert lark(tool_choice="weather") == named
    assert "call)*" not in lark(parallel_tool_calls=False)
    assert lark(tool_choice="none") == ""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    assert '"integer"' in lark(response_format=schema)
    assert '"integer"' not in lark(response_format=schema, tool_choice="required")


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_arguments_are_those_that_the_schema_names() -> None:
    point = {"properties": {"x": {"type": "integer"}}}
    tools = [
        tool("plain", parameters={"type": "object", "properties": {"p": point}}),
        tool("empty", parameters={"type": "object"}),
        tool("absent"),
        tool("open", parameters={**point, "additionalProperties": {"type": "integer"}}),
    ]
    backend = backend_saying("x")
    free = {"structured_outputs": {"disable_any_whitespace": True}}
    assert chat(make_app(backend), tools=tools, **free).status_code == 200
    text = backend.requests[0].params.grammar
    assert text is not None
    rules = re.findall(r"arguments_\d: %json (.*)", Grammar.decode(text).text)
    plain, empty, absent, free_keys = map(json.loads, rules)
    assert plain["additionalProperties"] is False
    assert plain["properties"]["p"]["additionalProperties"] is False
    for schema in (empty, absent):
        assert schema["properties"] == {} and schema["additionalProperties"] is False
    assert free_keys["additionalProperties"] == {"type": "integer"}
    assert plain["x-guidance"] == {"whitespace_flexible": False}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "required"),
        (
            {"tools": [WEATHER], "tool_choice": {"function": {"name": "nope"}}},
            "tool_choice",
            "nope",
        ),
        ({"tools": [tool(), tool()]}, "tools", "same name"),
        ({"tools": [tool("a b")]}, "tools", "letters"),
        ({"tools": [tool(parameters=[])]}, "tools", "parameters"),
        ({"tools": [tool(strict=True, parameters={"not": {}})]}, "tools", "not"),
        ({"tools": [tool(str(i)) for i in range(513)]}, "tools", "512"),
        ({"tools": [WEATHER], "guided_regex": "x"}, "tools", "grammar"),
    ],
)
def test_wrong_tools_are_refused(fields: dict[str, Any], param: str, words: str) -> None:
    response = chat(make_app(backend_saying("x")), **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_a_header_says_what_is_not_enforced() -> None:
    loose = tool("loose", parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}})
    broken = tool("broken", parameters={"properties": {"a": {"pattern": "(?=a)b"}}})
    response = chat(make_app(backend_saying("x")), tools=[loose, broken, WEATHER])
    notes = response.headers["x-loramux-tools"]
    assert "loose" in notes and "uniqueItems" in notes and "broken" in notes
    assert "weather" not in notes
    assert "x-loramux-tools" not in chat(make_app(backend_saying("x")), tools=[WEATHER]).headers


def test_turns_with_calls_and_results_reach_the_template() -> None:
    backend = backend_saying("ok")
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": "{}"}}  # fmt: skip
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    assert post(make_app(backend), CHAT, body).status_code == 200
    assert backend.codec.messages == messages
    # Mistral's templates take ids of nine letters and digits only.
    assert post(make_app(backend, tool_call_parser="mistral"), CHAT, body).status_code == 200
    _, asked, result = backend.codec.messages
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9 and result["tool_call_id"].isalnum()
    # A template that reads no tools gets them as text.
    assert post(make_app(backend, tool_call_parser="generic"), CHAT, body).status_code == 200
    system, _, asked, result = backend.codec.messages
    assert "weather" in system["content"] and backend.codec.tools is None
    assert json.loads(asked["content"]) == {"tool_call": {"name": "weather", "arguments": {}}}
    assert result["role"] == "user" and "sunny" in result["content"]
