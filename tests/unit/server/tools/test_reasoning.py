"""Reasoning before an answer: split from it, and free of its grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.config.serve import REASONING_PARSERS
from loramux.engine.grammar.library import check_grammar
from loramux.server.chat.tools.reasoning import ReasoningSplitter, find_reasoning
from loramux.types.grammar import Grammar
from tests.unit.server.asgi_client import chat, events_of, make_app
from tests.unit.server.tools.test_families import Codec
from tests.unit.server.tools.test_tools import CALL, WEATHER, backend_saying

THOUGHT = "<think>\nHm </th \n</think>\n\n"


def split(text: str, size: int, *, is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
    parts.append(splitter.flush())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_is_what_stands_before_the_mark(size: int) -> None:
    for is_open in (False, True):
        assert split(THOUGHT + "Yes\n", size, is_open=is_open) == ("\nHm </th \n", "Yes\n")
    assert split("Hm</think>Yes", size, is_open=True) == ("Hm", "Yes")
    assert split("Yes </think>", size, is_open=False) == ("", "Yes </think>")
    assert split("<thi", size, is_open=False) == ("", "<thi")
    assert split("Hm </thi", size, is_open=True) == ("Hm </thi", "")


def test_replies_and_streams_have_reasoning_apart() -> None:
    backend = backend_saying(*THOUGHT, "Yes")
    app = make_app(backend, reasoning_parser="qwen3")
    message = chat(app).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "\nHm </th \n" and message["content"] == "Yes"
    events = events_of(chat(app, stream=True).text)
    deltas = [event["choices"][0]["delta"] for event in events[:-1] if event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "\nHm </th \n"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes"
    hidden = chat(app, include_reasoning=False).json()["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": "Yes"}
    assert "<think>" in chat(make_app(backend)).json()["choices"][0]["message"]["content"]


def test_calls_after_reasoning() -> None:
    app = make_app(backend_saying(THOUGHT, CALL), reasoning_parser="qwen3")
    choice = chat(app, tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "\nHm </th \n"
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("parser", REASONING_PARSERS)
@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
def test_a_grammar_begins_after_the_reasoning(
    parser: str, marks: tuple[str, ...], tmp_path: Any
) -> None:
    codec = Codec(tmp_path, marks)
    found = find_reasoning(parser, codec.tokenizer)
    schema = json.dumps({"type": "integer"})
    kinds = (
        ("json_schema", schema, "12"),
        ("regex", "[a-c]{2}", "ab"),
        ("lark", 'start: "x"', "x"),
    )
    for kind, text, good in kinds:
        grammar = Grammar(kind, text, reasoning=found)  # type: ignore[arg-type]
        check_grammar(grammar)
        assert Grammar.decode(grammar.encode()) == grammar
        assert codec.accepts(grammar, f"<think>\nany {{text\n</think>\n\n{good}")
        assert not codec.accepts(grammar, "<think>\nany\n</think>\n\n?")
        assert codec.accepts(grammar, good) is (parser == "qwen3")
        assert codec.accepts(grammar, f"any</think>{good}") is (parser == "deepseek_r1")


def test_the_grammar_of_a_request_gets_the_marks() -> None:
    backend = backend_saying("x")
    app = make_app(backend, reasoning_parser="deepseek_r1")
    chat(app, guided_regex="x")
    text = backend.requests[0].params.grammar
    assert text is not None
    marks = Grammar.decode(text).reasoning
    assert marks is not None and marks.is_open
