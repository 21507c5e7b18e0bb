"""Ollama's routes: chat, generate and the list of models; streams are lines of JSON."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loramux.backend import TextCodec
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.server.body import json_response
from loramux.server.caller import caller_of
from loramux.server.context import Context
from loramux.server.endpoint import Endpoint
from loramux.server.errors import NotServed, error_info, shaped_response
from loramux.server.families.asked import (
    Asked,
    Constraint,
    Tools,
    generation_body,
    open_asked,
    read_fields,
    read_inner,
)
from loramux.server.generation import Deltas, Generation, RouteKind, collect, run
from loramux.server.names import Selected
from loramux.server.receipt_draft import receipt_draft
from loramux.server.routes.models import list_models
from loramux.server.routes.tokens import DescribesTokenizer
from loramux.server.selection import ModelReference, codec_for, select
from loramux.server.streaming import StreamForm, line, stream_events, until_gone
from loramux.server.usage import UsageCount
from loramux.server.wire import GenerationBody

FAMILY = "ollama"
CHAT = RouteKind(id_prefix="ollama", prompt_param="messages", default_max_tokens=None)
GENERATE = RouteKind(id_prefix="ollama", prompt_param="prompt", default_max_tokens=None)
LATEST = ":latest"
# The version whose API this is; clients compare it.
VERSION = "0.9.0"
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


class Body(Struct, kw_only=True):
    model: str
    stream: bool = True
    format: Any = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None
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


Write = Callable[[str], dict[str, Any]]
"""Writes a piece of text as fields of an answer."""


def ollama_error(error: Exception) -> Response:
    info = error_info(error)
    return shaped_response(error, {"error": info.message}, info.code)


def error_line(error: Exception) -> bytes:
    return line({"error": error_info(error).message})


def ollama_endpoints(context: Context) -> list[Endpoint]:
    async def chat(request: Request) -> Response:
        return await _chat(context, request)

    async def generate(request: Request) -> Response:
        return await _generate(context, request)

    async def tags(request: Request) -> Response:
        models = [_tag(context, entry.id) for entry in await list_models(context)]
        return json_response({"models": models})

    async def loaded(request: Request) -> Response:
        context.require_known()
        shown = _tag(context, context.base_names[0])
        return json_response({"models": [shown | {"size_vram": 0, "expires_at": _now()}]})

    async def show(request: Request) -> Response:
        body = await read_fields(context, request, ShowBody)
        selected = await _select(context, request, body.model or body.name or "")
        codec = await codec_for(context, selected)
        return json_response(_show(context, codec, is_base=not selected.adapters))

    async def version(request: Request) -> Response:
        return json_response({"version": VERSION})

    def at(path: str, handler: Any, *methods: str) -> Endpoint:
        return Endpoint(
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
        at("/api/tags", tags, "GET"),
        at("/api/ps", loaded, "GET"),
        at("/api/show", show),
        at("/api/version", version, "GET"),
    ]


async def _chat(context: Context, request: Request) -> Response:
    body = await read_fields(context, request, ChatBody)
    if any(message.get("images") for message in body.messages):
        raise InvalidRequest("This model reads text only: leave images out.", param="images")
    if not body.messages:
        return json_response(_loaded(body, {"message": {"role": "assistant", "content": ""}}))
    asked = Asked(
        kind=CHAT,
        body=_generation_body(body),
        selected=await _select(context, request, body.model),
        name=body.model,
        messages=body.messages,
        template=_template(body),
        constraint=_constraint(body),
        tools=None if body.tools is None else Tools(body.tools),
    )
    return await _answer(
        context,
        request,
        body,
        asked,
        lambda text: {"message": {"role": "assistant", "content": text}},
    )


async def _generate(context: Context, request: Request) -> Response:
    body = await read_fields(context, request, GenerateBody)
    for name in ("images", "template", "context", "suffix"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name} is not supported by this server: leave it out.", param=name
            )
    if not body.prompt:
        return json_response(_loaded(body, {"response": ""}))
    messages = None
    if not body.raw:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
    asked = Asked(
        kind=GENERATE,
        body=_generation_body(body),
        selected=await _select(context, request, body.model),
        name=body.model,
        prompts=[body.prompt],
        messages=messages,
        template=_template(body),
        constraint=_constraint(body),
    )
    return await _answer(context, request, body, asked, lambda text: {"response": text})


async def _answer(
    context: Context, request: Request, body: Body, asked: Asked, write: Write
) -> Response:
    started = time.monotonic_ns()
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        generation = await open_asked(context, request, draft, asked)
    deltas = run(context, generation)
    answer = _Answer(body.model, write, started)
    if body.stream:
        form = StreamForm(media_type="application/x-ndjson", on_error=error_line)
        return await stream_events(request, _lines(generation, deltas, answer), form)
    choices, usage = await until_gone(request, collect(generation, deltas))
    reason = choices[0].finish_reason
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return json_response(answer.last(choices[0].text, reason, counts))


class _Answer:
    """Writes the parts of one answer."""

    def __init__(self, model: str, write: Write, started_ns: int) -> None:
        self._model = model
        self._write = write
        self._started_ns = started_ns
        self._first_ns: int | None = None

    def part(self, text: str) -> dict[str, Any]:
        if self._first_ns is None:
            self._first_ns = time.monotonic_ns()
        head = {"model": self._model, "created_at": _now()}
        return head | self._write(text) | {"done": False}

    def last(self, text: str, reason: str, counts: tuple[int, int]) -> dict[str, Any]:
        now = time.monotonic_ns()
        first = self._first_ns or now
        return self.part(text) | {
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
    async with aclosing(deltas):
        async for index, delta in deltas:
            count.add(index, delta)
            reason = reason if delta.finish_reason is None else delta.finish_reason.value
            yield line(answer.part(delta.text))
    usage = count.usage()
    yield line(answer.last("", reason, (usage.prompt_tokens, usage.completion_tokens)))


def _generation_body(body: Body) -> GenerationBody:
    options = read_inner(body.options, Options)
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
        **sampling,
    )


async def _select(context: Context, request: Request, name: str) -> Selected:
    """Finds a model whose name may have the tag `latest`."""
    context.require_ready()
    for candidate in dict.fromkeys((name, name.removesuffix(LATEST))):
        try:
            reference = ModelReference(candidate)
            return await select(context, reference, caller=caller_of(request))
        except (NotServed, AdapterNotFound):
            continue
    raise NotServed(f"model '{name}' not found", param="model")


def _template(body: Body) -> dict[str, Any]:
    if body.think:
        raise InvalidRequest("think is not supported by this server: leave it out.", param="think")
    return {} if body.think is None else {"enable_thinking": False}


def _constraint(body: Body) -> Constraint | None:
    if not body.format:
        return None
    kind = "json_object" if body.format == "json" else "json_schema"
    return Constraint(kind, body.format, "format")


def _loaded(body: Body, fields: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without a prompt, which asks Ollama to load the model."""
    head = {"model": body.model, "created_at": _now()}
    return head | fields | {"done": True, "done_reason": "load"}


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
        "capabilities": ["completion"],
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
