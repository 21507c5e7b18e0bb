"""Content blocks of Anthropic's messages: text, thinking and uses of tools."""

from __future__ import annotations

import json
from typing import Any

from msgspec import UNSET

from loramux.server.http.streaming import named_event
from loramux.wire.text import ChatDelta, ToolCallDelta

_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class Blocks:
    """Collects the blocks of one answer, and writes their events."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []

    def add(self, delta: ChatDelta) -> bytes:
        """Return the events of a piece of the answer."""
        written = b""
        if delta.reasoning_content:
            written += self._extend("thinking", delta.reasoning_content)
        if delta.content:
            written += self._extend("text", delta.content)
        for call in delta.tool_calls or ():
            written += self._call(call)
        return written

    def end(self) -> bytes:
        """Return the events that end the last block; an answer of nothing is an empty text."""
        head = b"" if self._blocks else self._open({"type": "text", "text": ""})
        return head + self._close()

    def whole(self) -> list[dict[str, Any]]:
        """Return the complete blocks; a use of a tool that was cut is left out."""
        shown = []
        for block, text in zip(self._blocks, self._texts, strict=True):
            if block["type"] != "tool_use":
                shown.append(block | {block["type"]: text})
                continue
            try:
                shown.append(block | {"input": json.loads(text or "{}")})
            except ValueError:
                continue
        return shown

    def _call(self, call: ToolCallDelta) -> bytes:
        written = b""
        if call.id is not UNSET and call.function.name is not UNSET:
            call_id = call.id.replace("call_", "toolu_", 1)
            block = {"type": "tool_use", "id": call_id, "name": call.function.name, "input": {}}
            written = self._close() + self._open(block)
        arguments = call.function.arguments
        return written + (self._extend("tool_use", arguments) if arguments else b"")

    def _extend(self, kind: str, text: str) -> bytes:
        head = b""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            head = self._close() + self._open({"type": kind, kind: ""} | signature)
        self._texts[-1] += text
        delta = {"type": _DELTAS[kind], _FIELDS[kind]: text}
        return head + block_event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _open(self, block: dict[str, Any]) -> bytes:
        self._blocks.append(block)
        self._texts.append("")
        place = len(self._blocks) - 1
        return block_event("content_block_start", index=place, content_block=block)

    def _close(self) -> bytes:
        place = len(self._blocks) - 1
        return block_event("content_block_stop", index=place) if self._blocks else b""


def block_event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})
