"""B6: choices among tools in the words of other APIs, and assistants that refused."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.server.chat.tools.definitions import read_tools
from loramux.types.grammar import Grammar
from tests.unit.server.asgi_client import chat, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend
from tests.unit.server.tools.test_tools import CALL, WEATHER, backend_saying

TIME, MAIL = ({"type": "function", "function": {"name": name}} for name in ("time", "mail"))
TOOLS = [WEATHER, TIME, MAIL]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_may_be_called_and_all_are_listed(mode: str) -> None:
    choice = read_tools(TOOLS, allowed(mode, "time", "weather"))
    assert choice is not None and choice.mode == mode and not choice.is_named
    assert [tool.name for tool in choice.tools] == ["weather", "time"]
    assert list(choice.listed) == TOOLS


def test_allowed_tools_constrain_the_answer() -> None:
    backend = backend_saying(CALL)
    reply = chat(make_app(backend), tools=TOOLS, tool_choice=allowed("required", "weather"))
    assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = Grammar.decode(backend.requests[0].params.grammar or "").text
    assert "weather" in grammar and "mail" not in grammar
    assert backend.codec.tools == TOOLS


def test_allowed_tools_of_responses() -> None:
    backend = backend_saying(CALL)
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    body = {"input": "x", "tools": functions, "tool_choice": choice}
    response = post(make_app(backend), "/v1/responses", body)
    assert response.status_code == 200, response.text
    assert "mail" not in Grammar.decode(backend.requests[0].params.grammar or "").text


@pytest.mark.parametrize(
    "choice",
    [
        allowed("any", "weather"),
        allowed("auto"),
        allowed("auto", "nope"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
        "some",
    ],
)
def test_a_choice_that_cannot_be_followed_is_refused(choice: Any) -> None:
    error = chat(make_app(), tools=TOOLS, tool_choice=choice).json()["error"]
    assert (error["code"], error["param"]) == (400, "tool_choice")


def test_any_is_mistrals_word_for_required() -> None:
    choice = read_tools(TOOLS, "any")
    assert choice is not None and choice.mode == "required" and len(choice.tools) == 3


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": None, "refusal": None}, ""),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "Yes.", "refusal": None}, "Yes."),
    ],
)
def test_an_assistant_that_refused_has_its_refusal_as_content(
    message: dict[str, Any], text: str
) -> None:
    backend = ScriptedBackend()
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", **message},
        {"role": "user", "content": "Why?"},
    ]
    assert chat(make_app(backend), messages=messages).status_code == 200
    assert bytes(backend.requests[0].prompt_token_ids).decode() == f"u:Hi\na:{text}\nu:Why?\na:"


def test_a_user_without_content_is_refused() -> None:
    assert chat(make_app(), messages=[{"role": "user", "content": None}]).status_code == 400
