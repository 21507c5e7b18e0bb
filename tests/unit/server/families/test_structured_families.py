"""Structured output and tools in other servers' APIs."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from loramux.types.grammar import Grammar, GrammarOptions
from loramux.types.request import FinishReason
from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend
from tests.unit.server.test_openai_client import with_client
from tests.unit.server.tools.test_tools import CALL, WEATHER, backend_saying

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = WEATHER["function"]["parameters"]  # type: ignore[index]
CITY = {"city": "Rome"}
THOUGHT = "<think>\nHm\n</think>\n\n"
FREE: dict[str, Any] = {"guided_whitespace_pattern": " {0,9}"}
TOOLS: dict[str, Any] = {
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 20,
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
    },
    "/api/chat": {"model": "legal", "messages": MESSAGES, "stream": False, "tools": [WEATHER]},
}


def lorax(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hi", "parameters": parameters}


def sglang(**sampling: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling_params": sampling}


def ollama(form: Any) -> dict[str, Any]:
    return {"model": "legal", "prompt": "hi", "stream": False, "format": form}


def grammar_of(path: str, body: dict[str, Any], backend: ScriptedBackend | None = None) -> Grammar:
    backend = backend or ScriptedBackend()
    response = post(make_app(backend), path, body)
    assert response.status_code == 200, response.text
    grammar = backend.requests[0].params.grammar
    assert grammar is not None
    return Grammar.decode(grammar)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", lorax(response_format={"type": "json_object", "schema": SCHEMA})),
        ("/generate", lorax(grammar={"type": "json", "value": SCHEMA})),
        ("/generate", lorax(grammar={"type": "json_schema", "value": {"schema": SCHEMA}})),
        ("/generate", sglang(json_schema=json.dumps(SCHEMA))),
        ("/completion", {"prompt": "hi", "json_schema": SCHEMA}),
        ("/api/generate", ollama(SCHEMA)),
        ("/v1/responses", {"input": "hi", "text": {"format": {
            "type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "output_config": {
            "format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/invocations", lorax(response_format={"type": "json_schema", "schema": SCHEMA})),
    ],
)  # fmt: skip
def test_schemas(path: str, body: dict[str, Any]) -> None:
    found = grammar_of(path, body)
    assert found.options == GrammarOptions()
    schema = json.loads(found.text)
    assert found.kind == "json_schema"
    assert schema["properties"] == SCHEMA["properties"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", lorax(response_format={"type": "json_object"})),
        ("/generate", sglang(json_schema="$$ANY$$")),
        ("/api/generate", ollama("json")),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}),
    ],
)
def test_any_object(path: str, body: dict[str, Any]) -> None:
    assert json.loads(grammar_of(path, body).text) == {"type": "object"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", lorax(grammar={"type": "json", "value": SCHEMA}, **FREE)),
        ("/generate", sglang(json_schema=json.dumps(SCHEMA), **FREE)),
        ("/completion", {"prompt": "hi", "json_schema": SCHEMA, **FREE}),
        ("/api/generate", ollama(SCHEMA) | FREE),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}, **FREE}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "output_config": {
            "format": {"type": "json_schema", "schema": SCHEMA}}, **FREE}),
    ],
)  # fmt: skip
def test_a_field_allows_more_whitespace(path: str, body: dict[str, Any]) -> None:
    assert grammar_of(path, body).options == GrammarOptions(whitespace_pattern=" {0,9}")


@pytest.mark.parametrize("path", TOOLS)
def test_a_field_allows_more_whitespace_in_arguments(path: str) -> None:
    assert " {0,9}" in grammar_of(path, TOOLS[path] | FREE, backend_saying("x")).text


def test_regular_expressions_and_grammars() -> None:
    for body in (lorax(grammar={"type": "regex", "value": "a+"}), sglang(regex="a+")):
        assert grammar_of("/generate", body) == Grammar("regex", "a+")
    gbnf = 'root ::= "a"'
    found = [
        grammar_of("/completion", {"prompt": "hi", "grammar": gbnf}),
        grammar_of("/generate", sglang(ebnf=gbnf)),
    ]
    assert found[0] == found[1] and found[0].kind == "lark"


def test_min_tokens_of_sglang() -> None:
    backend = ScriptedBackend()
    body = sglang(min_new_tokens=3, max_new_tokens=9)
    assert post(make_app(backend), "/generate", body).status_code == 200
    assert backend.requests[0].params.min_tokens == 3


@pytest.mark.parametrize("path", TOOLS)
def test_the_model_reads_the_tools_and_its_calls_follow_a_grammar(path: str) -> None:
    backend = backend_saying(CALL)
    assert post(make_app(backend), path, TOOLS[path]).status_code == 200
    (tool,) = backend.codec.tools
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"] == PARAMETERS
    assert backend.requests[0].params.grammar is not None


def test_calls_of_a_message() -> None:
    body = TOOLS["/v1/messages"]
    answer = post(make_app(backend_saying("Hm. " + CALL)), "/v1/messages", body).json()
    text, call = answer["content"]
    assert text == {"type": "text", "text": "Hm. "}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": CITY}
    assert answer["stop_reason"] == "tool_use"
    cut = backend_saying(CALL[:55], finish=FinishReason.LENGTH)
    answer = post(make_app(cut), "/v1/messages", body).json()
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")


def test_the_choice_among_the_tools_of_a_message() -> None:
    other = {"name": "other", "input_schema": {"type": "object"}}
    body = TOOLS["/v1/messages"]
    tools = [*body["tools"], other]

    def grammar(choice: Any) -> str | None:
        backend = backend_saying(CALL)
        fields = body | {"tools": tools, "tool_choice": choice}
        assert post(make_app(backend), "/v1/messages", fields).status_code == 200
        return backend.requests[0].params.grammar

    assert grammar({"type": "none"}) is None
    auto, needed = grammar({"type": "auto"}), grammar({"type": "any"})
    assert auto is not None and needed is not None and auto != needed
    single = grammar({"type": "any", "disable_parallel_tool_use": True})
    assert single not in (None, needed)
    named = grammar({"type": "tool", "name": "other"})
    assert named is not None and "other" in named and "weather" not in named


def test_events_of_a_message_with_thinking_text_and_calls() -> None:
    backend = backend_saying(THOUGHT, "So ", CALL[:40], CALL[40:], "\n", CALL)
    app = make_app(backend, reasoning_parser="qwen3")
    response = post(app, "/v1/messages", TOOLS["/v1/messages"] | {"stream": True})
    data = [line for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in data]
    started = [one for one in events if one["type"] == "content_block_start"]
    kinds = [one["content_block"]["type"] for one in started]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [one["index"] for one in started] == [0, 1, 2, 3]
    stopped = [one["index"] for one in events if one["type"] == "content_block_stop"]
    assert stopped == [0, 1, 2, 3]
    pieces = [one for one in events if one["type"] == "content_block_delta"]
    texts = ["".join(next(iter(reversed(one["delta"].values()))) for one in pieces
                     if one["index"] == i) for i in range(4)]  # fmt: skip
    assert texts[0] == "\nHm\n" and texts[1] == "So "
    assert [json.loads(text) for text in texts[2:]] == [CITY, CITY]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    whole = post(app, "/v1/messages", TOOLS["/v1/messages"]).json()
    assert [block["type"] for block in whole["content"]] == kinds


def test_tools_are_counted_as_the_model_reads_them() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS["/v1/messages"]["tools"]}
    backend = backend_saying()
    answer = post(make_app(backend), "/v1/messages/count_tokens", body)
    assert answer.json() == {"input_tokens": 2} and len(backend.codec.tools) == 1


def test_calls_and_reasoning_of_a_response() -> None:
    backend = backend_saying(THOUGHT, "So ", CALL)
    app = make_app(backend, reasoning_parser="qwen3")
    answer = post(app, "/v1/responses", TOOLS["/v1/responses"]).json()
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "\nHm\n"}]
    assert message["content"][0]["text"] == "So "
    assert (call["type"], call["name"], call["status"]) == (
        "function_call", "weather", "completed",
    )  # fmt: skip
    assert json.loads(call["arguments"]) == CITY and call["call_id"].startswith("call_")


def test_events_of_a_response_with_calls() -> None:
    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        tools: Any = TOOLS["/v1/responses"]["tools"]
        stream = await client.responses.create(model="legal", input="hi", tools=tools, stream=True)
        return [event async for event in stream]

    events = with_client(work, backend_saying("So ", CALL[:40], CALL[40:], "\n", CALL))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    for place in (1, 2):
        deltas = [
            event.delta
            for event in events
            if event.type.endswith("arguments.delta") and event.output_index == place
        ]
        assert json.loads("".join(deltas)) == CITY
    output = events[-1].response.output
    assert [item.type for item in output] == ["message", "function_call", "function_call"]
    assert output[1].call_id != output[2].call_id


def test_functions_of_a_response_may_stand_in_a_namespace() -> None:
    group = {"type": "namespace", "name": "home", "tools": TOOLS["/v1/responses"]["tools"]}
    tools = [group, {"type": "function", "name": "other"}]
    backend = backend_saying(CALL)
    answer = post(make_app(backend), "/v1/responses", {"input": "hi", "tools": tools}).json()
    (call,) = answer["output"]
    assert (call["name"], call["namespace"]) == ("weather", "home")
    assert [tool["function"]["name"] for tool in backend.codec.tools] == ["weather", "other"]
    assert answer["tools"] == tools


def test_the_named_function_of_a_response() -> None:
    tools = [*TOOLS["/v1/responses"]["tools"], {"type": "function", "name": "other"}]
    backend = backend_saying(CALL)
    body = {"input": "hi", "tools": tools, "tool_choice": {"type": "function", "name": "other"}}
    assert post(make_app(backend), "/v1/responses", body).status_code == 200
    grammar = backend.requests[0].params.grammar
    assert grammar is not None and "weather" not in grammar


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_thinking_of_ollama(stream: bool) -> None:
    backend = backend_saying(THOUGHT, "So ", CALL[:40], CALL[40:], "\n", CALL)
    app = make_app(backend, reasoning_parser="qwen3")
    body = TOOLS["/api/chat"] | {"stream": stream, "think": True}
    lines = [json.loads(line) for line in post(app, "/api/chat", body).text.splitlines()]
    messages = [line["message"] for line in lines]
    assert "".join(one["content"] for one in messages) == "So "
    assert "".join(one.get("thinking", "") for one in messages) == "\nHm\n"
    calls = [call for one in messages for call in one.get("tool_calls", ())]
    assert calls == [{"function": {"name": "weather", "arguments": CITY}}] * 2
    assert lines[-1]["done"] and lines[-1]["done_reason"] == "stop"


def test_thinking_of_a_prompt_for_ollama() -> None:
    app = make_app(backend_saying(THOUGHT, "Yes"), reasoning_parser="qwen3")
    answer = post(app, "/api/generate", {"model": "legal", "prompt": "x", "stream": False}).json()
    assert (answer["response"], answer["thinking"]) == ("Yes", "\nHm\n")
