"""Messages as clients send them, to messages as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loramux.errors import InvalidRequest


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Text parts become one string, and the arguments of tool calls become objects."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _refusal("messages must be a list of objects with a role and content.")
    if not messages:
        raise _refusal("messages must not be empty: send at least one.")
    return [_normalize(message, place) for place, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _refusal(f"messages[{place}] must be an object with a role, such as 'user'.")
    normal = {**message, "content": _text(message.get("content"), place)}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise _refusal(f"The tool_calls of messages[{place}] must be a list.")
        normal["tool_calls"] = [_tool_call(call, place) for call in message["tool_calls"]]
    elif normal["content"] is None:
        raise _refusal(f"messages[{place}] has no content: give it a string.")
    return normal


def _text(content: object, place: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(f"The content of messages[{place}] must be a string or a list of parts.")
    return "\n".join(_part_text(part, place) for part in content)


def _part_text(part: object, place: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise _refusal(f"The content of messages[{place}] has a part that is not text.")
    return text


def _tool_call(call: object, place: int) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise _refusal(f"A tool call of messages[{place}] has no function.")
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise _refusal(
            f"The arguments of a tool call of messages[{place}] are not JSON: {error}"
        ) from error
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
