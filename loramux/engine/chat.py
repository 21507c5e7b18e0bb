"""Normalizes chat messages of clients to the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loramux.errors import InvalidRequest


def read_chat_template(given: str | None) -> str | None:
    """Return the template that a setting names: a file, or the text itself."""
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"--chat-template names no template that can be read: {given}: {error}.",
            param="chat_template",
        ) from error


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join text parts to one string, and parse the arguments of tool calls to objects."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _refusal("messages must be a list of objects with a role and content.")
    if not messages:
        raise _refusal("messages must not be empty: send at least one.")
    return [_normalize(message, index) for index, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _refusal(f"messages[{index}] must be an object with a role, such as 'user'.")
    normal = {**message, "content": _text(message.get("content"), index)}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise _refusal(f"The tool_calls of messages[{index}] must be a list.")
        normal["tool_calls"] = [_tool_call(call, index) for call in message["tool_calls"]]
        # Templates concatenate it to other text.
        normal["content"] = normal["content"] or ""
    elif normal["content"] is None:
        raise _refusal(f"messages[{index}] has no content: give it a string.")
    return normal


def _text(content: object, index: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(f"The content of messages[{index}] must be a string or a list of parts.")
    return "\n".join(_part_text(part, index) for part in content)


def _part_text(part: object, index: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise _refusal(f"The content of messages[{index}] has a part that is not text.")
    return text


def _tool_call(call: object, index: int) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise _refusal(f"A tool call of messages[{index}] has no function.")
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise _refusal(
            f"The arguments of a tool call of messages[{index}] are not JSON: {error}"
        ) from error
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
