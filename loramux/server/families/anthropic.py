"""Anthropic's POST /v1/messages and its token count."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, Struct
from starlette.responses import Response

from loramux.errors import ContextLengthExceeded, InvalidRequest
from loramux.server.chat.conversation import NO_TOOLS, Conversation, Tools
from loramux.server.chat.structured.fields import AskedConstraint
from loramux.server.chat.tools.writer import CALLED, ChatWriter, write_deltas
from loramux.server.context import Context
from loramux.server.errors import error_info, shaped_response
from loramux.server.generate.asked import (
    Asked,
    encode,
    generation_body,
    plan_asked,
)
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.generation import Deltas, Generation, RouteKind, collect, run
from loramux.server.generate.prompts import off_loop
from loramux.server.generate.receipt_draft import UsageCount, receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.selection import ModelReference, codec_for, select
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.http.streaming import StreamForm, named_event, stream_events, until_gone
from loramux.types.sampling import SamplingParams
from loramux.wire.text import ChatDelta, ToolCallDelta, Usage

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


FAMILY = "anthropic"
KIND = RouteKind(id_prefix="msg", prompt_param="messages", default_max_tokens=None)
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class CountBody(Struct, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    thinking: dict[str, Any] | None = None


class MessageBody(CountBody, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    guided_whitespace_pattern: str | None = None
    adapters: list[str] | None = None
    adapter_weights: list[float] | None = None


def anthropic_error(error: Exception) -> Response:
    info = error_info(error)
    message = info.message
    if isinstance(error, ContextLengthExceeded):
        # The words by which clients know that they must shorten the conversation.
        message = f"prompt is too long: {message}"
    kind = ERROR_TYPES.get(info.code, "api_error")
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return shaped_response(error, body, info.code)


def error_event(error: Exception) -> bytes:
    return named_event("error", json.loads(bytes(anthropic_error(error).body)))


def anthropic_routes(context: Context) -> list[Route]:
    async def create(request: Call) -> Response:
        return await _create(context, request)

    async def count(request: Call) -> Response:
        body = await read_fields(context, request, CountBody, generates=False)
        context.require_known()
        selected = await select(context, ModelReference(body.model), caller=request.caller)
        asked = Asked(kind=KIND, body=generation_body(), chat=_chat(body))
        codec, limit = await codec_for(context, selected), context.backend.card.max_model_len
        plan = await plan_asked(context, asked, SamplingParams(), codec)
        [token_ids] = await off_loop(
            len(str(body.messages)),
            lambda: encode(asked, plan, codec, limit),
            codec=codec,
            base=context.backend.codec,
        )
        return json_response({"input_tokens": len(token_ids)})

    return [
        Route(family=FAMILY, path=path, handler=handler, shape=anthropic_error)
        for path, handler in (("/v1/messages", create), ("/v1/messages/count_tokens", count))
    ]


async def _create(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, MessageBody)
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        generation = await open_asked(context, request, draft, _asked(body))
    deltas = run(context, generation)
    if body.stream:
        form = StreamForm(on_error=error_event)
        return await stream_events(request, _events(generation, deltas), form)
    choices, usage = await until_gone(request, collect(generation, deltas))
    choice, blocks = choices[0], Blocks()
    reply = generation.request.reply
    written, reason = write_deltas(reply, choice.text, choice.finish_reason)
    for one in written:
        blocks.add(one)
    blocks.end()
    answer = _message(generation, blocks.whole(), _usage(usage))
    receipt = generation.draft.receipt
    extra = {} if receipt is None else {"serving": receipt}
    return json_response(answer | _stop(reason, choice.stop_reason) | extra)


def _asked(body: MessageBody) -> Asked:
    form = (body.output_config or {}).get("format")
    return Asked(
        kind=KIND,
        body=generation_body(
            model=body.model,
            adapters=body.adapters,
            adapter_weights=body.adapter_weights,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences,
            stream=body.stream,
            guided_whitespace_pattern=body.guided_whitespace_pattern,
            user=(body.metadata or {}).get("user_id"),
        ),
        constraint=None if form is None else _constraint(form),
        chat=_chat(body),
    )


def _chat(body: CountBody) -> Conversation:
    return Conversation(messages=_messages(body), tools=_tools(body))


def _tools(body: CountBody) -> Tools:
    """Tools in OpenAI's form."""
    choice, is_parallel = _choice(body.tool_choice)
    if not body.tools:
        if choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice needs tools to choose from.", param="tool_choice")
        return NO_TOOLS
    return Tools([_function(tool) for tool in body.tools], choice, is_parallel)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"A tool of type {tool['type']!r} is not supported: send tools of your own.",
            param="tools",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": function}


def _choice(choice: Any) -> tuple[Any, bool]:
    """Return the choice in OpenAI's form, and whether an answer may have several calls."""
    if choice is None:
        return None, True
    fields = choice if isinstance(choice, dict) else {}
    kind = fields.get("type")
    named = {"type": "function", "function": {"name": fields.get("name")}}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if not isinstance(kind, str) or kind not in choices:
        raise InvalidRequest(
            "tool_choice.type must be auto, any, tool or none.", param="tool_choice"
        )
    return choices[kind], not fields.get("disable_parallel_tool_use")


def _constraint(form: Any) -> AskedConstraint:
    param = "output_config"
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidRequest("output_config.format.type must be json_schema.", param=param)
    return AskedConstraint("json", form.get("schema"), param)


def _messages(body: CountBody) -> list[dict[str, Any]]:
    messages = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for message in body.messages:
        messages += _chat_messages(message)
    return messages


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message in OpenAI's form; results of tools become messages of their own."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    written: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            result = _text(block.get("content") or "", "tool_result")
            written.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            )
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            blocks.append(block)
    if blocks or calls:
        shown: dict[str, Any] = {"role": role, "content": _text(blocks, "messages")}
        if calls:
            shown["tool_calls"] = calls
        written.append(shown)
    return written


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        fields: dict[str, Any] = block if isinstance(block, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            raise InvalidRequest(
                f"A block of type {fields.get('type')!r} is not supported: this model reads text.",
                param="messages" if param == "tool_result" else param,
            )
        texts.append(fields["text"])
    return "\n".join(texts)


def _message(
    generation: Generation, content: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": generation.request.id.replace("msg-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": generation.request.selected.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop(reason: str, stop_reason: str | int | None) -> dict[str, Any]:
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reason == CALLED:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


async def _events(generation: Generation, deltas: Deltas) -> AsyncGenerator[bytes, None]:
    count = UsageCount(generation.engine_requests)
    writer, blocks = ChatWriter(generation.request.reply), Blocks()
    stop: dict[str, Any] = {}
    is_first = True
    async with aclosing(deltas):
        async for index, delta in deltas:
            count.add(index, delta)
            written = b"".join(map(blocks.add, writer.write(delta)))
            if delta.finish_reason is not None:
                stop = _stop(writer.finish_reason(delta.finish_reason), delta.stop_reason)
            if is_first:
                message = _message(generation, [], _usage(count.usage()))
                written = block_event("message_start", message=message) + written
            is_first = False
            if written:
                yield written
    yield blocks.end()
    yield block_event("message_delta", delta=stop, usage=_usage(count.usage()))
    yield block_event("message_stop")
