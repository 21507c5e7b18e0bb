"""OpenAI's POST /v1/responses, without stored conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.chat.conversation import NO_TOOLS, Conversation, Tools
from loramux.server.chat.structured.fields import AskedConstraint
from loramux.server.chat.tools.writer import ChatWriter, write_deltas
from loramux.server.context import Context
from loramux.server.errors import error_info
from loramux.server.families.responses_items import Items
from loramux.server.families.responses_tools import chat_tools, namespace_of_each
from loramux.server.generate.asked import (
    Asked,
    generation_body,
)
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.generation import Deltas, Generation, RouteKind, collect, run
from loramux.server.generate.receipt_draft import receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.sampling import Logprobs
from loramux.server.generate.usage import UsageCount
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.http.streaming import StreamForm, stream_events, until_gone
from loramux.server.routes.openai import chat_logprobs
from loramux.types.request import TokenLogprob
from loramux.types.sampling import MAX_LOGPROBS
from loramux.wire.text import Usage

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
