"""The conversation as the chat template of a family takes it: tools, earlier calls, results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from loramux.server.chat.tools.families import TEXT_BEGIN, TEXT_END, Family

_NO_SYSTEM = "System role not supported"
_SHORT_ID_LENGTH = 9

Message = dict[str, Any]


def render_messages(
    messages: Sequence[Message],
    family: Family,
    tools: Sequence[Mapping[str, Any]],
    template: str,
) -> list[Message]:
    """Return the messages for the template; `tools` are listed if it does not read them."""
    if family.reads_tools:
        return [_with_short_ids(message) if family.short_ids else message for message in messages]
    written = [_as_text(message, family) for message in messages]
    return _with_tool_list(written, tools, template) if tools else written


def _with_short_ids(message: Message) -> Message:
    """Replace the ids of calls, of which the template takes nine letters and digits only."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])}
            if isinstance(call, dict) and isinstance(call.get("id"), str)
            else call
            for call in message["tool_calls"]
        ]
    return changed


def _short(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_LENGTH]


def _as_text(message: Message, family: Family) -> Message:
    """Write calls and results as text, for a template that knows neither."""
    calls = message.get("tool_calls")
    if message.get("role") == "tool":
        result = {"tool_result": {"content": message.get("content")}}
        return {"role": "user", "content": json.dumps(result, ensure_ascii=False)}
    if not isinstance(calls, list) or not calls:
        return message
    written = [_call_text(call, family) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    text = [message["content"]] if isinstance(message.get("content"), str) else []
    return {**rest, "content": "\n".join(filter(None, [*text, *written]))}


def _call_text(call: Any, family: Family) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = function.get("name", "")
    return f"{family.before_name}{name}{family.before_arguments}{arguments}{family.after_call}"


def _with_tool_list(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], template: str
) -> list[Message]:
    listed = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these tools:\n{listed}\n"
        'To call one, answer {"tool_call": {"name": its name, "arguments": its arguments}}. '
        f"To answer without one, answer {TEXT_BEGIN}your text{TEXT_END} as JSON."
    )
    first = messages[0] if messages else {}
    wants_user = _NO_SYSTEM in template
    if isinstance(first.get("content"), str) and (
        first.get("role") == "system" or (wants_user and first.get("role") == "user")
    ):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "user" if wants_user else "system", "content": text}, *messages]
