"""Items of a response: messages, calls and reasoning, with the events of their stream."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from loramux.server.http.streaming import named_event
from loramux.wire.text import ChatDelta, ChatTokenLogprob, ToolCallDelta

_CONTENT = {"message": "output_text", "reasoning": "reasoning_text"}


class Items:
    """Collects the items of one response, and writes events with their numbers."""

    def __init__(self, namespaces: Mapping[str, str]) -> None:
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        self.logprobs: list[ChatTokenLogprob] = []
        """The tokens whose text comes next."""
        self._text = ""
        self._listed: list[ChatTokenLogprob] = []
        self._number = 0

    def event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        written = named_event(kind, {"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return written

    def add(self, delta: ChatDelta) -> bytes:
        """Return the events of a piece of the answer."""
        written = b""
        if delta.reasoning_content:
            written += self._extend("reasoning", delta.reasoning_content)
        if delta.content:
            written += self._extend("message", delta.content)
        for call in delta.tool_calls or ():
            written += self._call(call)
        return written

    def end(self, status: str) -> bytes:
        """Return the events that end the last item; a response of nothing is an empty message."""
        head = b"" if self.items else self._open(_message())
        return head + self._close(status)

    def _call(self, call: ToolCallDelta) -> bytes:
        written = b""
        if call.id is not UNSET and call.function.name is not UNSET:
            namespace = self._namespaces.get(call.function.name)
            item = {
                "id": _id("fc"),
                "type": "function_call",
                "call_id": call.id,
                "name": call.function.name,
                "arguments": "",
                **({} if namespace is None else {"namespace": namespace}),
            }
            written = self._close("completed") + self._open(item)
        arguments = call.function.arguments
        self._text += arguments
        if arguments:
            written += self.event("function_call_arguments.delta", **self._place(), delta=arguments)
        return written

    def _extend(self, kind: str, text: str) -> bytes:
        head = b""
        if not self.items or self.items[-1]["type"] != kind:
            item = _message() if kind == "message" else _reasoning()
            head = self._close("completed") + self._open(item)
        self._text += text
        place = self._place() | {"content_index": 0}
        if kind == "message":
            return head + self.event(
                "output_text.delta", **place, delta=text, logprobs=self._take_logprobs()
            )
        return head + self.event("reasoning_text.delta", **place, delta=text)

    def _open(self, item: dict[str, Any]) -> bytes:
        self.items.append(item | {"status": "in_progress"})
        self._text = ""
        place = len(self.items) - 1
        written = self.event("output_item.added", output_index=place, item=self.items[-1])
        if item["type"] == "function_call":
            return written
        part = _part(item["type"], "")
        return written + self.event(
            "content_part.added", **self._place(), content_index=0, part=part
        )

    def _close(self, status: str) -> bytes:
        if not self.items:
            return b""
        item, place, text = self.items[-1], self._place(), self._text
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            written = self.event(
                "function_call_arguments.done", **place, name=item["name"], arguments=text
            )
        else:
            part = _part(item["type"], text)
            if item["type"] == "message":
                self._take_logprobs()
                part["logprobs"], self._listed = self._listed, []
            item["content"] = [part]
            of_part = place | {"content_index": 0}
            if item["type"] == "message":
                written = self.event(
                    "output_text.done", **of_part, text=text, logprobs=part["logprobs"]
                )
            else:
                written = self.event("reasoning_text.done", **of_part, text=text)
            written += self.event("content_part.done", **of_part, part=part)
        index = place["output_index"]
        return written + self.event("output_item.done", output_index=index, item=item)

    def _take_logprobs(self) -> list[ChatTokenLogprob]:
        taken, self.logprobs = self.logprobs, []
        self._listed += taken
        return taken

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _message() -> dict[str, Any]:
    return {"id": _id("msg"), "type": "message", "role": "assistant", "content": []}


def _reasoning() -> dict[str, Any]:
    return {"id": _id("rs"), "type": "reasoning", "summary": [], "content": []}


def _part(kind: str, text: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _CONTENT[kind], "text": text} | extra


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
