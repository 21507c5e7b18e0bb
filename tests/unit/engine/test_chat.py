from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.engine.chat import normalize_messages, read_chat_template
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import InvalidRequest
from tests.tokenizer_factory import save_byte_level


def tool_call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": arguments}}],
    }


def test_a_template_is_a_file_or_its_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")
    assert read_chat_template(str(file)) == "{{ messages[0].content }}!"
    assert read_chat_template("{{ x }}" * 1000) == "{{ x }}" * 1000
    assert read_chat_template(None) is None
    with pytest.raises(InvalidRequest, match="--chat-template"):
        read_chat_template(str(tmp_path / "none"))
    save_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, chat_template=read_chat_template(str(file)))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "hi!"


def test_text_parts_become_one_string() -> None:
    """Catches a template that prints a Python list to the model."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts, "name": "ann"}]
    assert normalize_messages(messages) == [{"role": "user", "content": "one\ntwo", "name": "ann"}]
    assert messages[0]["content"] is parts


@pytest.mark.parametrize("arguments", ['{"city": "Bonn"}', {"city": "Bonn"}])
def test_arguments_of_tool_calls_become_objects(arguments: Any) -> None:
    """Catches a JSON string that a template would encode once more."""
    (message,) = normalize_messages([tool_call(arguments)])
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        ({"role": "user"}, "must be a list"),
        ([{"content": "hello"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": "hello"}, 3], r"messages\[1\]"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": 3}], "string or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not text"),
        ([tool_call("{")], "not JSON"),
        ([{"role": "assistant", "tool_calls": ["weather"]}], "has no function"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, says: str) -> None:
    """Catches an error from deep within a template, or an answer to an empty question."""
    with pytest.raises(InvalidRequest, match=says) as refusal:
        normalize_messages(messages)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("calls", [5, True, {"function": {}}, "x"])
def test_tool_calls_must_be_a_list(calls: object) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    with pytest.raises(InvalidRequest, match="must be a list"):
        normalize_messages([message])


def test_too_deeply_nested_tool_arguments_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    with pytest.raises(InvalidRequest, match="not JSON"):
        normalize_messages([message])
