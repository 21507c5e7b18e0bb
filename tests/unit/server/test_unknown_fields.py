"""B4: what was accepted without a word: unknown fields, roles and types of schemas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.asgi_client import chat, complete, make_app, post
from tests.unit.server.scripted_backend import ByteCodec, ScriptedBackend
from tests.unit.server.tools.test_tools import backend_saying

WARNING = "x-loramux-warning"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("stopping_strings", ["x"], "send stop"),
        ("random_seed", 5, "send seed"),
        ("rep_pen", 1.2, "send repetition_penalty"),
        ("banned_strings", ["x"], "send bad_words"),
        ("negative_prompt", "x", "leave it out"),
        ("guidance_scale", 3, "leave it out"),
        ("instructions", "Rhyme.", "put it into the prompt or messages"),
        ("reasoning", {"effort": "low"}, "send reasoning_effort"),
        ("mcp_servers", [{"url": "x"}], "send its functions as tools"),
    ],
)
def test_fields_whose_neglect_changes_the_answer_are_refused(
    field: str, value: Any, instead: str
) -> None:
    backend = ScriptedBackend()
    response = chat(make_app(backend), **{field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert instead in error["message"] and not backend.requests


@pytest.mark.parametrize("field", ["mcp_servers", "container"])
def test_messages_refuses_what_would_run_tools_elsewhere(field: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, field: [{"url": "https://example.com"}]}
    response = post(make_app(), "/v1/messages", body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert field in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named_in_a_header(stream: bool) -> None:
    response = chat(make_app(), stream=stream, wobble=1, wibble=None)
    assert response.status_code == 200
    assert response.headers[WARNING] == "unknown fields were ignored: wobble, wibble"


def test_a_header_of_unknown_fields_is_short_and_printable() -> None:
    response = chat(make_app(), **{"naïve\r\nx": 1}, **{f"f{i}" * 90: i for i in range(50)})
    warning = response.headers[WARNING]
    assert warning.startswith("unknown fields were ignored: na?ve??x, f0f0")
    assert warning.endswith("and 43 more") and len(warning) < 1000


def test_fields_without_effect_are_no_reason_to_warn() -> None:
    fields: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "x",
        "user": "u",
    }
    assert WARNING not in chat(make_app(), **fields).headers
    assert chat(make_app(unknown_fields="refuse"), **fields).status_code == 200


def test_unknown_fields_may_be_ignored_or_refused() -> None:
    assert WARNING not in chat(make_app(unknown_fields="ignore"), wobble=1).headers
    error = chat(make_app(unknown_fields="refuse"), temprature=1).json()["error"]
    assert (error["code"], error["param"]) == (400, "temprature")
    assert "Did you mean temperature?" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("/api/chat", {"model": "legal", "messages": MESSAGES}, "wobble, options.wabble"),
        ("/", {"inputs": "x"}, "wobble, parameters.wabble"),
        ("/generate", {"text": "x"}, "wobble, sampling_params.wabble"),
    ],
)
def test_unknown_fields_of_other_apis_are_named_with_their_place(
    path: str, body: dict[str, Any], shown: str
) -> None:
    outer, inner = shown.split(", ")
    place, name = inner.split(".")
    app, sent = make_app(), body | {outer: 1, place: {name: 1}}
    warning = post(app, path, sent).headers[WARNING]
    assert outer in warning and inner in warning
    refused = post(make_app(unknown_fields="refuse"), path, body | {place: {name: 1}})
    assert refused.status_code in (400, 422) and inner in refused.text


def test_another_spelling_of_a_field_is_refused() -> None:
    error = complete(make_app(), maxTokens=5).json()["error"]
    assert (error["code"], error["param"]) == (400, "maxTokens")
    assert "send max_tokens" in error["message"]
    assert complete(make_app(), maxTokens=None).status_code == 200


class TemplateCodec(ByteCodec):
    def tokenizer_info(self) -> dict[str, Any]:
        return {"chat_template": "{% if message.role == 'critic' %}"}

    def added_token_id(self, text: str) -> int | None:
        return None


def test_a_role_that_nobody_knows_is_refused() -> None:
    messages = [{"role": "robot", "content": "x"}]
    error = chat(make_app(), messages=messages).json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")
    assert "robot" in error["message"] and "assistant" in error["message"]
    body = {"model": "legal", "messages": messages}
    assert "robot" in post(make_app(), "/api/chat", body).json()["error"]
    anthropic = post(make_app(), "/v1/messages", {"messages": messages, "max_tokens": 5})
    assert anthropic.json()["error"]["type"] == "invalid_request_error"


def test_a_role_of_the_chat_template_is_taken() -> None:
    backend = ScriptedBackend()
    backend.codec = TemplateCodec()
    app = make_app(backend)
    for role, status in (("critic", 200), ("crit", 400), ("robot", 400)):
        answer = chat(app, messages=[{"role": role, "content": "x"}])
        assert answer.status_code == status, role


def tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": "objct"}, "parameters.type"),
        ({"type": "string"}, "parameters.type"),
        ({"properties": {"a": {"type": "strng"}}}, "parameters.properties.a.type"),
        ({"properties": {"a": {"items": {"type": ["int"]}}}}, "a.items.type"),
        ({"properties": {"a": {"anyOf": [{"type": "nul"}]}}}, "a.anyOf[0].type"),
        ({"properties": ["a"]}, "parameters.properties"),
        ({"properties": {"a": "string"}}, "parameters.properties.a"),
        ({"required": "a"}, "parameters.required"),
        ({"properties": {"a": {"enum": "b"}}}, "a.enum"),
    ],
)
def test_a_tool_whose_parameters_are_no_schema_is_refused(parameters: Any, place: str) -> None:
    backend = ScriptedBackend()
    error = chat(make_app(backend), tools=tool(parameters)).json()["error"]
    assert (error["code"], error["param"]) == (400, "tools")
    assert place in error["message"] and not backend.requests


def test_a_misspelt_type_of_a_tool_is_named_with_the_right_one() -> None:
    error = chat(make_app(), tools=tool({"type": "objct"})).json()["error"]
    assert "Did you mean object?" in error["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"type": {"type": "string"}, "enum": {}}},
        {"type": ["object", "null"], "properties": {"required": {"type": "boolean"}}},
        {"properties": {"a": {"enum": ["type"], "default": {"type": "x"}}}, "required": []},
        {"additionalProperties": False},
        None,
    ],
)
def test_a_tool_with_a_schema_is_taken(parameters: Any) -> None:
    assert chat(make_app(backend_saying("ok")), tools=tool(parameters)).status_code == 200
