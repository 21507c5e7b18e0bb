"""Ollama's routes: chat, generate and the list of models; streams are lines of JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, ClassVar

from msgspec import UNSET, Struct
from starlette.responses import Response

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.chat.conversation import Conversation, Tools
from loramux.server.chat.structured.fields import AskedConstraint
from loramux.server.chat.tools.writer import ChatWriter, write_deltas
from loramux.server.context import Context
from loramux.server.errors import error_info, shaped_response
from loramux.server.families.ollama_embed import embed, embed_one, select_tagged
from loramux.server.generate.asked import (
    Asked,
    check_penalty_window,
    generation_body,
)
from loramux.server.generate.checked_fields import read_fields, read_inner
from loramux.server.generate.fim import FillPrompt
from loramux.server.generate.generation import Deltas, Generation, RouteKind, collect, run
from loramux.server.generate.receipt_draft import UsageCount, receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.sampling import LOWEST, Logprobs
from loramux.server.generate.selection import codec_for
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.http.streaming import StreamForm, line, stream_events, until_gone
from loramux.server.live.lists import list_models
from loramux.server.routes.tokens import DescribesTokenizer
from loramux.types.request import TokenLogprob
from loramux.wire.text import ChatDelta, ChatMessage, FunctionCall, GenerationBody, ToolCall

_UNITS = r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_UNITS})+)")
_MAX_SHOWN = 100


def is_zero(keep_alive: Any) -> bool:
    """Whether a time to stay loaded is 0; raises InvalidRequest for what is no time.

    It is a number of seconds, or a text such as 5m or 1h30m.
    """
    if keep_alive is None:
        return False
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return keep_alive == 0
    if isinstance(keep_alive, str) and _DURATION.fullmatch(keep_alive):
        return not any(digit in keep_alive for digit in "123456789")
    shown = str(keep_alive)[:_MAX_SHOWN]
    raise InvalidRequest(f'time: invalid duration "{shown}"', param="keep_alive")


def written_logprobs(codec: TextCodec, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the log probabilities of tokens, with the most likely ones where they were asked."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": codec.token_to_str(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(codec.token_bytes(token_id)),
        }

    return [
        shown(one.token_id, one.logprob)
        | ({"top_logprobs": [shown(i, logprob) for i, logprob in one.top]} if one.top else {})
        for one in logprobs
    ]


FAMILY = "ollama"
CHAT = RouteKind(id_prefix="ollama", prompt_param="messages", default_max_tokens=None)
GENERATE = RouteKind(id_prefix="ollama", prompt_param="prompt", default_max_tokens=None)
# The version whose API this is; clients compare it.
VERSION = "0.9.0"
MAX_TOP_LOGPROBS = 20
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


class Options(Struct, kw_only=True):
    """Options that change the answer; others are about the machine."""

    num_predict: int = -1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None


class Body(Struct, kw_only=True):
    inner: ClassVar = ("options", Options)
    model: str
    stream: bool = True
    format: Any = None
    guided_whitespace_pattern: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None
    """0: the answer to a request without a prompt says that the model was unloaded."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    think: bool | str | None = None


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class GenerateBody(Body, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None
    images: list[str] | None = None
    template: str | None = None
    context: list[int] | None = None


class ShowBody(Struct, kw_only=True):
    model: str | None = None
    name: str | None = None


Write = Callable[[ChatMessage], dict[str, Any]]
"""Writes a piece of an answer as its fields."""


def ollama_error(error: Exception) -> Response:
    info = error_info(error)
    return shaped_response(error, {"error": info.message}, info.code)


def error_line(error: Exception) -> bytes:
    return line({"error": error_info(error).message})


def ollama_routes(context: Context) -> list[Route]:
    async def chat(request: Call) -> Response:
        return await _chat(context, request)

    async def generate(request: Call) -> Response:
        return await _generate(context, request)

    async def tags(request: Call) -> Response:
        entries = await list_models(context, request.caller)
        models = [_tag(context, entry.id) for entry in entries]
        return json_response({"models": models})

    async def loaded(request: Call) -> Response:
        context.require_known()
        shown = _tag(context, context.base_names[0])
        return json_response({"models": [shown | {"size_vram": 0, "expires_at": _now()}]})

    async def show(request: Call) -> Response:
        body = await read_fields(context, request, ShowBody, generates=False)
        selected = await select_tagged(context, request, body.model or body.name or "")
        codec = await codec_for(context, selected)
        return json_response(_show(context, codec, is_base=not selected.adapters))

    async def embed_texts(request: Call) -> Response:
        return await embed(context, request)

    async def embed_text(request: Call) -> Response:
        return await embed_one(context, request)

    async def version(request: Call) -> Response:
        return json_response({"version": VERSION})

    def at(path: str, handler: Any, *methods: str) -> Route:
        return Route(
            family=FAMILY,
            path=path,
            handler=handler,
            methods=methods or ("POST",),
            shape=ollama_error,
            any_type=True,
        )

    return [
        at("/api/chat", chat),
        at("/api/generate", generate),
        at("/api/embed", embed_texts),
        at("/api/embeddings", embed_text),
        at("/api/tags", tags, "GET"),
        at("/api/ps", loaded, "GET"),
        at("/api/show", show),
        at("/api/version", version, "GET"),
    ]


async def _chat(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, ChatBody)
    if any(message.get("images") for message in body.messages):
        raise InvalidRequest("This model reads text only: leave images out.", param="images")
    unloads = is_zero(body.keep_alive)
    selected = await select_tagged(context, request, body.model)
    if not body.messages:
        nothing = {"message": {"role": "assistant", "content": ""}}
        return json_response(_loaded(body, nothing, unloads=unloads))
    asked = Asked(
        kind=CHAT,
        body=_generation_body(context, request, body),
        selected=selected,
        logprobs=_logprobs(body),
        name=body.model,
        chat=Conversation(
            messages=body.messages,
            tools=Tools(body.tools),
            template=_template(context, body),
        ),
        constraint=_constraint(body),
    )
    return await _answer(context, request, body, asked, _chat_fields)


async def _generate(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, GenerateBody)
    for name in ("images", "template", "context"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name} is not supported by this server: leave it out.", param=name
            )
    if body.suffix and body.system:
        raise InvalidRequest("system does not go with suffix: leave it out.", param="system")
    unloads = is_zero(body.keep_alive)
    selected = await select_tagged(context, request, body.model)
    if not (body.prompt or body.suffix):
        return json_response(_loaded(body, {"response": ""}, unloads=unloads))
    chat, template = None, _template(context, body)
    if not (body.raw or body.suffix):
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
        chat = Conversation(messages=messages, template=template)
    asked = Asked(
        kind=GENERATE,
        body=_generation_body(context, request, body),
        selected=selected,
        logprobs=_logprobs(body),
        name=body.model,
        prompts=[FillPrompt(body.prompt, body.suffix) if body.suffix else body.prompt],
        chat=chat,
        constraint=_constraint(body),
    )
    return await _answer(context, request, body, asked, _generate_fields)


def _chat_fields(part: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": part.content or ""}
    if part.reasoning_content:
        fields["thinking"] = part.reasoning_content
    if part.tool_calls:
        functions = [
            {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")}
            for call in part.tool_calls
        ]
        fields["tool_calls"] = [{"function": function} for function in functions]
    return {"message": fields}


def _generate_fields(part: ChatMessage) -> dict[str, Any]:
    fields = {"response": part.content or ""}
    return fields | ({"thinking": part.reasoning_content} if part.reasoning_content else {})


async def _answer(
    context: Context, request: Call, body: Body, asked: Asked, write: Write
) -> Response:
    started = time.monotonic_ns()
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        generation = await open_asked(context, request, draft, asked)
    deltas = run(context, generation)
    wants_logprobs = asked.logprobs.num_output is not None
    answer = _Answer(
        body.model, write, started, generation.request.codec if wants_logprobs else None
    )
    if body.stream:
        form = StreamForm(media_type="application/x-ndjson", on_error=error_line)
        return await stream_events(request, _lines(generation, deltas, answer), form)
    choices, usage = await until_gone(request, collect(generation, deltas))
    choice, parts = choices[0], _Parts()
    written, _ = write_deltas(generation.request.reply, choice.text, choice.finish_reason)
    for delta in written:
        parts.add(delta)
    answer.add(choice.logprobs)
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return json_response(answer.last(parts.take(is_last=True), choice.finish_reason, counts))


class _Parts:
    """Collects what an answer has until it is taken; calls are whole, and cut ones left out."""

    def __init__(self) -> None:
        self._content = ""
        self._reasoning = ""
        self._calls: list[FunctionCall] = []

    def add(self, delta: ChatDelta) -> None:
        self._content += delta.content or ""
        self._reasoning += delta.reasoning_content or ""
        for call in delta.tool_calls or ():
            if call.function.name is not UNSET:
                self._calls.append(FunctionCall(name=call.function.name, arguments=""))
            self._calls[-1].arguments += call.function.arguments

    def take(self, *, is_last: bool) -> ChatMessage:
        """Return what was added; the last call is returned when the answer has ended."""
        ended = self._calls if is_last else self._calls[:-1]
        self._calls = self._calls[len(ended) :]
        part = ChatMessage(content=self._content)
        if self._reasoning:
            part.reasoning_content = self._reasoning
        calls = [ToolCall(id="", function=one) for one in ended if _is_json(one.arguments)]
        if calls:
            part.tool_calls = calls
        self._content = self._reasoning = ""
        return part


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class _Answer:
    """Writes the parts of one answer."""

    def __init__(
        self, model: str, write: Write, started_ns: int, codec: TextCodec | None = None
    ) -> None:
        """`codec`: with it, the parts have log probabilities."""
        self._codec = codec
        self._logprobs: list[TokenLogprob] = []
        self._model = model
        self._write = write
        self._started_ns = started_ns
        self._first_ns: int | None = None

    def add(self, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Add the tokens of the next part."""
        self._logprobs += logprobs or ()

    def part(self, part: ChatMessage) -> dict[str, Any]:
        if self._first_ns is None:
            self._first_ns = time.monotonic_ns()
        head = {"model": self._model, "created_at": _now()}
        written: dict[str, Any] = head | self._write(part) | {"done": False}
        if self._codec is not None and self._logprobs:
            written["logprobs"] = written_logprobs(self._codec, self._logprobs)
            self._logprobs = []
        return written

    def last(self, part: ChatMessage, reason: str, counts: tuple[int, int]) -> dict[str, Any]:
        now = time.monotonic_ns()
        first = self._first_ns or now
        return self.part(part) | {
            "done": True,
            "done_reason": reason,
            "total_duration": now - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": counts[0],
            "prompt_eval_duration": first - self._started_ns,
            "eval_count": counts[1],
            "eval_duration": now - first,
        }


async def _lines(
    generation: Generation, deltas: Deltas, answer: _Answer
) -> AsyncGenerator[bytes, None]:
    count = UsageCount(generation.engine_requests)
    reason = ""
    writer, parts = ChatWriter(generation.request.reply), _Parts()
    async with aclosing(deltas):
        async for index, delta in deltas:
            count.add(index, delta)
            reason = reason if delta.finish_reason is None else delta.finish_reason.value
            written = writer.write(delta)
            for one in written:
                parts.add(one)
            answer.add(delta.logprobs)
            if written:
                yield line(answer.part(parts.take(is_last=False)))
    usage = count.usage()
    last = parts.take(is_last=True)
    yield line(answer.last(last, reason, (usage.prompt_tokens, usage.completion_tokens)))


def _generation_body(context: Context, request: Call, body: Body) -> GenerationBody:
    options = read_inner(context, request, "options", body.options, Options)
    check_penalty_window(options)
    sampling = {
        name: value if (given := getattr(options, name)) is None else given
        for name, value in DEFAULTS.items()
    }
    return generation_body(
        max_tokens=None if options.num_predict < 0 else options.num_predict,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        stream=body.stream,
        guided_whitespace_pattern=body.guided_whitespace_pattern,
        **sampling,
    )


def _template(context: Context, body: Body) -> dict[str, Any]:
    if body.think and context.options.reasoning_parser is None:
        raise InvalidRequest(
            "think needs a server that was started with --reasoning-parser: leave it out.",
            param="think",
        )
    return {} if body.think is None else {"enable_thinking": bool(body.think)}


def _logprobs(body: Body) -> Logprobs:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return Logprobs(top if body.logprobs else None)


def _constraint(body: Body) -> AskedConstraint | None:
    if not body.format:
        return None
    if body.format == "json":
        return AskedConstraint("json_object", True, "format")
    return AskedConstraint("json", body.format, "format")


def _loaded(body: Body, fields: dict[str, Any], *, unloads: bool) -> dict[str, Any]:
    """Return the answer to a request without a prompt, which asks Ollama to load or unload the
    model.

    Here the tiers decide what stays on the device.
    """
    head = {"model": body.model, "created_at": _now()}
    return head | fields | {"done": True, "done_reason": "unload" if unloads else "load"}


def _tag(context: Context, name: str) -> dict[str, Any]:
    card = context.backend.card
    given = context.names.find(name)
    digest = given.cid if given is not None and given.cid is not None else card.digest
    return {
        "name": name,
        "model": name,
        "modified_at": _time(context.created_s if given is None else given.created_s),
        "size": 0 if given is None else given.num_bytes,
        "digest": digest.rpartition(":")[2],
        "details": _details(context, is_base=given is None),
    }


def _show(context: Context, codec: TextCodec, *, is_base: bool) -> dict[str, Any]:
    card = context.backend.card
    info = codec.tokenizer_info() if isinstance(codec, DescribesTokenizer) else {}
    return {
        "modelfile": f"FROM {card.name}\n",
        "parameters": "",
        "template": info.get("chat_template") or "",
        "details": _details(context, is_base=is_base),
        "model_info": {
            "general.architecture": card.shapes.architecture if card.shapes else "unknown",
            "general.parameter_count": card.shapes.num_parameters if card.shapes else 0,
            "context_length": card.max_model_len,
        },
        "capabilities": ["completion", "tools"],
        "modified_at": _time(context.created_s),
    }


def _details(context: Context, *, is_base: bool) -> dict[str, Any]:
    card = context.backend.card
    family = card.shapes.architecture if card.shapes else ""
    return {
        "parent_model": "" if is_base else context.base_names[0],
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": str(card.shapes.num_parameters) if card.shapes else "",
        "quantization_level": card.dtype,
    }


def _now() -> str:
    return _time(time.time())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
