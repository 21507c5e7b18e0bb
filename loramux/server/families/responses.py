"""OpenAI's POST /v1/responses, without stored conversations."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, Struct
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.chat.conversation import NO_TOOLS, Conversation, Tools
from loramux.server.chat.structured.fields import AskedConstraint
from loramux.server.chat.tools.writer import ChatWriter, write_deltas
from loramux.server.context import Context
from loramux.server.errors import error_info
from loramux.server.families.openai import chat_logprobs
from loramux.server.generate.asked import (
    Asked,
    generation_body,
)
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.generation import Deltas, Generation, RouteKind, collect, run
from loramux.server.generate.receipt_draft import UsageCount, receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.sampling import Logprobs
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.http.streaming import StreamForm, named_event, stream_events, until_gone
from loramux.types.request import TokenLogprob
from loramux.types.sampling import MAX_LOGPROBS
from loramux.wire.text import ChatDelta, ChatTokenLogprob, ToolCallDelta, Usage


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for _, tool in _functions(tools, None)
    ]


def namespace_of_each(tools: Sequence[Any]) -> dict[str, str]:
    """Return function -> its namespace, which stands in calls of it."""
    found = ((namespace, tool.get("name")) for namespace, tool in _functions(tools, None))
    return {
        name: namespace
        for namespace, name in found
        if namespace is not None and isinstance(name, str)
    }


def _functions(
    tools: Sequence[Any], namespace: str | None
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            yield from _functions(_grouped(tool), tool["name"])
        elif kind != "function":
            raise InvalidRequest(
                f"A tool of type {kind!r} is not supported: send functions, alone or in a "
                "namespace.",
                param="tools",
            )
        else:
            yield namespace, tool


def _grouped(tool: dict[str, Any]) -> list[Any]:
    tools = tool.get("tools")
    if not isinstance(tool.get("name"), str) or not isinstance(tools, list):
        raise InvalidRequest("A namespace needs a name and a list of tools.", param="tools")
    return tools


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


FAMILY = "responses"
KIND = RouteKind(id_prefix="resp", prompt_param="input", default_max_tokens=None)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
"""Other values of include: parts that no answer of this server has."""


class ResponseBody(Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    prompt: Any = None
    guided_whitespace_pattern: str | None = None
    adapters: list[str] | None = None
    adapter_weights: list[float] | None = None


def responses_routes(context: Context) -> list[Route]:
    async def create(request: Call) -> Response:
        return await answer_response(context, request)

    return [Route(family=FAMILY, path="/v1/responses", handler=create)]


async def answer_response(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, ResponseBody)
    _check(body)
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        generation = await open_asked(context, request, draft, _asked(body))
        if _LOGPROBS in (body.include or ()) and not generation.request.reply.is_plain:
            raise InvalidRequest(
                f"{_LOGPROBS} is for answers of text alone: leave out tools, and the server's "
                "--reasoning-parser.",
                param="include",
            )
    deltas = run(context, generation)
    writer = _Writer(generation, body)
    if body.stream:
        form = StreamForm(on_error=writer.failed)
        return await stream_events(request, _events(generation, deltas, writer), form)
    choices, usage = await until_gone(request, collect(generation, deltas))
    choice = choices[0]
    written, _ = write_deltas(generation.request.reply, choice.text, choice.finish_reason)
    writer.add_logprobs(choice.logprobs)
    for delta in written:
        writer.items.add(delta)
    writer.items.end(_status(choice.finish_reason))
    return json_response(writer.whole(choice.finish_reason, usage))


def _check(body: ResponseBody) -> None:
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name} is not supported: this server keeps no responses. Leave it out.",
                param=name,
            )
    if body.truncation not in (None, "disabled"):
        raise InvalidRequest("truncation must be disabled.", param="truncation")
    for one in body.include or ():
        if one != _LOGPROBS and one not in _INCLUDED:
            known = ", ".join((_LOGPROBS, *_INCLUDED))
            raise InvalidRequest(f"include has no {one!r}. Valid values: {known}.", param="include")
    if body.top_logprobs and _LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f'top_logprobs needs include: ["{_LOGPROBS}"].', param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be 0 to {MAX_LOGPROBS}.", param="top_logprobs")


def _asked(body: ResponseBody) -> Asked:
    effort = (body.reasoning or {}).get("effort")
    return Asked(
        kind=KIND,
        body=generation_body(
            model=body.model,
            adapters=body.adapters,
            adapter_weights=body.adapter_weights,
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            stream=body.stream,
            guided_whitespace_pattern=body.guided_whitespace_pattern,
            user=body.user,
        ),
        chat=Conversation(
            messages=messages_of(body.input, body.instructions),
            tools=_tools(body),
            template={} if effort is None else {"reasoning_effort": effort},
        ),
        constraint=_constraint(body),
        logprobs=Logprobs((body.top_logprobs or 0) if _LOGPROBS in (body.include or ()) else None),
    )


def _constraint(body: ResponseBody) -> AskedConstraint | None:
    form = (body.text or {}).get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedConstraint("json_object", True, "text")
    if kind != "json_schema":
        raise InvalidRequest(
            "text.format.type must be text, json_object or json_schema.", param="text"
        )
    return AskedConstraint("json", form.get("schema"), "text")


def _tools(body: ResponseBody) -> Tools:
    choice = body.tool_choice
    if not body.tools:
        return NO_TOOLS
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return Tools(chat_tools(body.tools), choice, body.parallel_tool_calls is not False)


def messages_of(
    given: str | list[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Return the input as messages of a chat; calls become tool_calls of an assistant's message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": item.get("content")})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and "tool_calls" in last:
                last["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": item.get("output"),
                }
            )
        elif kind != "reasoning":
            raise InvalidRequest(f"input has an item of type {kind!r}.", param="input")
    return messages


class _Writer:
    """Writes a response, and the events of its stream."""

    def __init__(self, generation: Generation, body: ResponseBody) -> None:
        self._generation = generation
        self._body = body
        self.items = Items(namespace_of_each(body.tools or ()))

    def add_logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Add the tokens of the next piece of text."""
        if logprobs:
            codec = self._generation.request.codec
            self.items.logprobs += chat_logprobs(codec, logprobs).content

    def whole(
        self, reason: str, usage: Usage | None, *, error: str | None = None
    ) -> dict[str, Any]:
        is_cut = reason == "length"
        status = _status(reason) if error is None else "failed"
        body, generation = self._body, self._generation
        receipt = generation.draft.receipt
        return {
            "id": generation.request.id.replace("resp-", "resp_"),
            "object": "response",
            "created_at": generation.created_s,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": generation.request.selected.model,
            "output": self.items.items if reason else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": generation.request.params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": generation.request.params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
            **({} if receipt is None else {"serving": receipt}),
        }

    def failed(self, error: Exception) -> bytes:
        message = error_info(error).message
        return self.items.event("failed", response=self.whole("", None, error=message))


async def _events(
    generation: Generation, deltas: Deltas, writer: _Writer
) -> AsyncGenerator[bytes, None]:
    count = UsageCount(generation.engine_requests)
    chat, items = ChatWriter(generation.request.reply), writer.items
    reason = ""
    started = writer.whole("", None)
    head = items.event("created", response=started) + items.event("in_progress", response=started)
    async with aclosing(deltas):
        async for index, delta in deltas:
            count.add(index, delta)
            reason = reason if delta.finish_reason is None else delta.finish_reason.value
            writer.add_logprobs(delta.logprobs)
            written = head + b"".join(map(items.add, chat.write(delta)))
            head = b""
            if written:
                yield written
    yield items.end(_status(reason))
    yield items.event(_status(reason), response=writer.whole(reason, count.usage()))


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed" if reason else "in_progress"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
