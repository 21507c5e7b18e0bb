"""llama.cpp's routes: completion, adapters by place, props, and its unversioned paths."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Container
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

from loramux import __version__
from loramux.backend.host import Health
from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.registry.audit import Action, Event
from loramux.server.auth.audit import audited
from loramux.server.chat.structured.fields import AskedConstraint
from loramux.server.context import Context
from loramux.server.errors import Forbidden, error_info, shaped_response
from loramux.server.families.openai import answer_chat
from loramux.server.families.sglang_info import shown_path
from loramux.server.generate.asked import (
    Asked,
    Prompt,
    check_penalty_window,
    generation_body,
)
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.fim import FillPrompt
from loramux.server.generate.generation import Choice, Deltas, Generation, RouteKind, collect, run
from loramux.server.generate.prompts import encode_prompt, off_loop
from loramux.server.generate.receipt_draft import Timing, receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.sampling import LOWEST, Logprobs
from loramux.server.http.body import decode, json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.http.streaming import StreamForm, event, stream_events, until_gone
from loramux.server.naming.names import GivenName
from loramux.server.routes.models import answer_models
from loramux.server.routes.tokens import DescribesTokenizer
from loramux.types.caller import ANONYMOUS, Caller

MAX_TENANTS = 1024


class PlacedAdapters:
    """Gives each name a place in the order of its addition; a place is never given again.

    Each tenant has places of its own for the names that it sees. At first no adapter is selected,
    because several that all act at once are of no use; only operators change that, for operators.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._places: OrderedDict[str | None, list[str]] = OrderedDict()
        self._scales: dict[int, float] = {}

    def listed(self, caller: Caller) -> list[dict[str, Any]]:
        names, given = self._refresh(caller)
        scales = self._scales if caller.is_operator else {}
        return [
            {
                "id": place,
                "path": given[name].path if caller.is_operator else name,
                "scale": scales.get(place, 0.0),
                "task_name": "",
                "prompt_prefix": "",
                "name": name,
            }
            for place, name in enumerate(names)
            if name in given
        ]

    def set_scales(self, raw: bytes) -> dict[str, float]:
        """Set and return the default selection; adapters that are not named get 0."""
        if not self._context.options.allow_runtime_lora_updating:
            raise Forbidden(
                "This server does not change its adapters at run time: start it with "
                "--allow-runtime-lora-updating, or send lora in each request."
            )
        asked = decode(raw, Any)
        if not isinstance(asked, list):
            raise InvalidRequest("Request body must be an array")
        names, given = self._refresh(ANONYMOUS)
        self._scales = self._parse(asked, names, given)
        return {names[place]: scale for place, scale in self._scales.items()}

    def selection(self, lora: Any, model: str | None, caller: Caller) -> dict[str, Any]:
        """Return the fields of the own API for a body's `lora`; empty or absent: the default
        selection, unless the body names a model."""
        if lora is not None and not isinstance(lora, list):
            raise _bad_lora()
        if not lora and model and model not in self._context.base_names:
            return {}
        names, given = self._refresh(caller)
        default = self._scales if caller.is_operator else {}
        scales = self._parse(lora, names, given) if lora else default
        used = {place: scale for place, scale in scales.items() if scale != 0}
        if not used and not lora:
            return {}
        return {
            "adapters": [names[place] for place in used],
            "adapter_weights": list(used.values()),
        }

    def _parse(
        self, entries: list[Any], names: list[str], given: Container[str]
    ) -> dict[int, float]:
        scales: dict[int, float] = {}
        for entry in entries:
            if not isinstance(entry, dict):
                raise _bad_lora()
            place: Any = entry.get("id")
            scale = entry.get("scale", 0)
            if isinstance(place, str) and place in names:
                place = names.index(place)
            is_place = isinstance(place, int) and not isinstance(place, bool)
            known = range(len(names))
            if not is_place or place not in known or names[int(place)] not in given:
                raise InvalidRequest(
                    f"There is no adapter {entry.get('id')!r}: see GET /lora-adapters.",
                    param="lora",
                )
            if not isinstance(scale, int | float) or not math.isfinite(scale):
                raise _bad_lora()
            scales[int(place)] = float(scale)
        return scales

    def _refresh(self, caller: Caller) -> tuple[list[str], dict[str, GivenName]]:
        """Return the places of the caller's tenant, and the given names that the caller sees."""
        tenant = self._context.view_of(replace(caller, adapters=None))
        known = {
            one.name: one for one in self._context.names.given() if tenant.sees_given(one.name)
        }
        places = self._places.setdefault(caller.confined_to, [])
        self._places.move_to_end(caller.confined_to)
        if len(self._places) > MAX_TENANTS:
            self._places.popitem(last=False)
        placed = set(places)
        places += [name for name in known if name not in placed]
        view = self._context.view_of(caller)
        return places, {name: one for name, one in known.items() if view.sees_given(name)}


def _bad_lora() -> InvalidRequest:
    return InvalidRequest(
        "'lora' must be an array of objects with 'id' and 'scale' fields", param="lora"
    )


FAMILY = "llamacpp"
KIND = RouteKind(id_prefix="cmpl", prompt_param="prompt", default_max_tokens=None)
CONTENT = frozenset({"content"})
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class CompletionBody(Struct, kw_only=True):
    prompt: Any
    model: str | None = None
    n_predict: int = -1
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    ignore_eos: bool = False
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    n_probs: int = 0
    return_tokens: bool = False
    grammar: str | None = None
    json_schema: Any = None
    guided_whitespace_pattern: str | None = None
    lora: Any = None


class InputExtra(Struct, kw_only=True):
    text: str
    filename: str = "file"


class InfillBody(CompletionBody, kw_only=True):
    """A hole between two texts; `prompt` is the beginning of the answer."""

    prompt: Any = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[InputExtra] = []


class TokenizeContent(Struct, kw_only=True):
    content: str
    add_special: bool = False
    with_pieces: bool = False


def llamacpp_error(error: Exception) -> Response:
    info = error_info(error)
    is_too_long = info.reason == "context_length_exceeded"
    kind = (
        "exceed_context_size_error" if is_too_long else ERROR_TYPES.get(info.code, "server_error")
    )
    body = {"error": {"code": info.code, "message": info.message, "type": kind}}
    return shaped_response(error, body, info.code)


def error_event(error: Exception) -> bytes:
    return event(json.loads(bytes(llamacpp_error(error).body)))


def llamacpp_routes(context: Context) -> list[Route]:
    placed = PlacedAdapters(context)

    async def chat(request: Call) -> Response:
        await _name_adapters(context, request, placed)
        return await answer_chat(context, request)

    async def models(request: Call) -> Response:
        return await answer_models(context, request.caller)

    async def list_lora(request: Call) -> Response:
        return json_response(placed.listed(request.caller))

    async def set_lora(request: Call) -> Response:
        return await _set_selection(context, request, placed)

    async def props(request: Call) -> Response:
        context.require_known()
        return json_response(_props(context, request))

    async def health(request: Call) -> Response:
        context.require_ready()
        return json_response({"status": "ok"})

    complete, infill = partial(_complete, context, placed), partial(_infill, context, placed)

    def at(
        path: str,
        handler: Callable[[Call], Awaitable[Response]],
        *methods: str,
        keys: frozenset[str] = frozenset(),
    ) -> Route:
        return Route(
            family=FAMILY,
            path=path,
            handler=handler,
            methods=methods or ("POST",),
            keys=keys,
            shape=llamacpp_error,
            any_type=handler in (complete, infill),
        )

    return [
        at("/completion", complete),
        at("/completions", complete),
        at("/infill", infill),
        at("/chat/completions", chat),
        at("/models", models, "GET"),
        at("/lora-adapters", list_lora, "GET"),
        at("/lora-adapters", set_lora),
        at("/props", props, "GET"),
        at("/v1/health", health, "GET"),
        at("/tokenize", partial(_tokenize, context), keys=CONTENT),
    ]


async def _set_selection(context: Context, request: Call, placed: PlacedAdapters) -> Response:
    raw = await read_body(request, context.options.max_body_bytes)
    change = Event(Action.SELECT, context.tenant_of(request.caller), "/lora-adapters")
    async with audited(context.database, request, change):
        change.details["adapters"] = placed.set_scales(raw)
    return json_response({"success": True})


async def _name_adapters(context: Context, request: Call, placed: PlacedAdapters) -> None:
    """Write `lora`, or the default selection, into the fields of the own API."""
    raw = await read_body(request, context.options.max_body_bytes)
    try:
        fields = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(fields, dict):
        caller = request.caller
        fields |= placed.selection(fields.pop("lora", None), fields.get("model"), caller)
        request.facts.body = msgspec.json.encode(fields)


async def _infill(context: Context, placed: PlacedAdapters, request: Call) -> Response:
    body = await read_fields(context, request, InfillBody)
    return await _answer(context, request, placed, body, [_hole(body)])


async def _complete(context: Context, placed: PlacedAdapters, request: Call) -> Response:
    body = await read_fields(context, request, CompletionBody)
    return await _answer(context, request, placed, body, _prompts(body.prompt))


async def _answer(
    context: Context,
    request: Call,
    placed: PlacedAdapters,
    body: CompletionBody,
    prompts: list[Prompt],
) -> Response:
    check_penalty_window(body)
    if body.stream and len(prompts) > 1:
        raise InvalidRequest("A stream takes one prompt: send them apart.", param="prompt")
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        asked = _asked(body, prompts, placed.selection(body.lora, body.model, request.caller))
        generation = await open_asked(context, request, draft, asked)
    deltas = run(context, generation)
    if body.stream:
        events = _events(generation, deltas, body)
        return await stream_events(request, events, StreamForm(on_error=error_event))
    choices, usage = await until_gone(request, collect(generation, deltas))
    cached = usage.prompt_tokens_details.cached_tokens
    answers = [
        _final(generation, body, at, choice, cached) | {"content": choice.text}
        for at, choice in enumerate(choices)
    ]
    is_batch = isinstance(body.prompt, list) and len(prompts) > 1
    return json_response(answers if is_batch else answers[0])


def _hole(body: InfillBody) -> FillPrompt:
    if not isinstance(body.prompt, str):
        raise InvalidRequest(
            "prompt must be the text with which the answer has begun.", param="prompt"
        )
    files = [(one.filename, one.text) for one in body.input_extra]
    return FillPrompt(body.input_prefix, body.input_suffix, body.prompt, files)


def _prompts(prompt: Any) -> list[Prompt]:
    """Return a text, token ids, a mix of both, or a list of these."""
    if not isinstance(prompt, list) or not prompt:
        return [_prompt(prompt)]
    is_one = any(isinstance(part, int) for part in prompt)
    return [_prompt(prompt)] if is_one else [_prompt(one) for one in prompt]


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    given = prompt if isinstance(prompt, list) else [None]
    parts = [one for one in given if isinstance(one, str | int) and not isinstance(one, bool)]
    if len(parts) != len(given):
        raise InvalidRequest(
            "prompt must be a text, token ids, a mix of both, or a list of these.",
            param="prompt",
        )
    return parts


def _asked(body: CompletionBody, prompts: list[Prompt], selection: dict[str, Any]) -> Asked:
    num = body.max_tokens if body.max_tokens is not None else body.n_predict
    sampling = {
        name: value if (given := getattr(body, name)) is None else given
        for name, value in DEFAULTS.items()
    }
    constraint = None
    if body.grammar:
        constraint = AskedConstraint("grammar", body.grammar, "grammar")
    elif body.json_schema is not None:
        constraint = AskedConstraint("json", body.json_schema, "json_schema")
    return Asked(
        kind=KIND,
        body=generation_body(
            max_tokens=None if num < 0 else num,
            seed=None if body.seed == -1 else body.seed,
            stop=body.stop,
            ignore_eos=body.ignore_eos,
            repetition_penalty=body.repeat_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=_logit_bias(body.logit_bias),
            stream=body.stream,
            guided_whitespace_pattern=body.guided_whitespace_pattern,
            **sampling,
            **({"model": body.model} | selection),
        ),
        prompts=prompts,
        logprobs=Logprobs(body.n_probs or None),
        constraint=constraint,
    )


def _logit_bias(given: Any) -> dict[int, float] | None:
    """Pairs of a token id and a bias; false, which forbids the token, is the lowest bias."""
    if not given:
        return None
    pairs = given.items() if isinstance(given, dict) else given
    try:
        return {int(token): -100.0 if bias is False else float(bias) for token, bias in pairs}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            "logit_bias must be pairs of a token id and a number.", param="logit_bias"
        ) from error


async def _events(
    generation: Generation, deltas: Deltas, body: CompletionBody
) -> AsyncGenerator[bytes, None]:
    choice, cached = Choice(), 0
    codec = generation.request.codec
    async with aclosing(deltas):
        async for _, delta in deltas:
            choice.add(delta)
            cached = cached if delta.num_reused is None else delta.num_reused
            part = {
                "index": 0,
                "content": delta.text,
                "tokens": list(delta.token_ids) if body.return_tokens else [],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": len(choice.token_ids),
                "tokens_evaluated": len(generation.request.prompts[0]),
            }
            if body.n_probs:
                part["completion_probabilities"] = _probabilities(codec, delta.logprobs or ())
            yield event(part)
    last = _final(generation, body, 0, choice, cached)
    last.pop("completion_probabilities", None)
    yield event(last | {"content": "", "tokens": []})


def _probabilities(codec: TextCodec, logprobs: Any) -> list[dict[str, Any]]:
    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "token": codec.token_to_str(token_id),
            "bytes": list(codec.token_bytes(token_id)),
            "logprob": max(logprob, LOWEST),
        }

    return [
        shown(one.token_id, one.logprob)
        | {"top_logprobs": [shown(i, logprob) for i, logprob in one.top]}
        for one in logprobs
    ]


def _final(
    generation: Generation,
    body: CompletionBody,
    at: int,
    choice: Choice,
    cached: int,
) -> dict[str, Any]:
    is_word = isinstance(choice.stop_reason, str)
    stop_type = "limit" if choice.finish_reason == "length" else "word" if is_word else "eos"
    request = generation.engine_requests[at]
    answer = {
        "index": at,
        "content": choice.text,
        "tokens": choice.token_ids if body.return_tokens else [],
        "id_slot": -1,
        "stop": True,
        "model": generation.request.selected.model,
        "tokens_predicted": len(choice.token_ids),
        "tokens_evaluated": len(request.prompt_token_ids),
        "tokens_cached": cached,
        "truncated": False,
        "stop_type": stop_type,
        "stopping_word": choice.stop_reason if is_word else "",
        "generation_settings": msgspec.to_builtins(request.params, str_keys=True),
        "timings": _timings(generation.draft.timing, len(request.prompt_token_ids), choice),
    }
    if body.n_probs:
        answer["completion_probabilities"] = _probabilities(
            generation.request.codec, choice.logprobs
        )
    return answer


def _timings(timing: Timing, num_prompt: int, choice: Choice) -> dict[str, float]:
    first_ms = timing.first_ms or timing.total_ms
    shown: dict[str, float] = {}
    for name, num, spent_ms in (
        ("prompt", num_prompt, first_ms),
        ("predicted", len(choice.token_ids), timing.total_ms - first_ms),
    ):
        shown |= {
            f"{name}_n": num,
            f"{name}_ms": spent_ms,
            f"{name}_per_token_ms": spent_ms / max(1, num),
            f"{name}_per_second": num * 1000 / spent_ms if spent_ms else 0.0,
        }
    return shown


async def _tokenize(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, TokenizeContent, generates=False)
    context.require_known()
    codec, max_model_len = context.backend.codec, context.backend.card.max_model_len

    def work() -> list[Any]:
        token_ids = encode_prompt(
            codec, body.content, max_model_len=max_model_len, add_special_tokens=body.add_special
        )
        if not body.with_pieces:
            return list(token_ids)
        return [{"id": i, "piece": codec.token_to_str(i)} for i in token_ids]

    return json_response({"tokens": await off_loop(len(body.content), work)})


def _props(context: Context, request: Call) -> dict[str, Any]:
    card, codec = context.backend.card, context.backend.codec
    info = codec.tokenizer_info() if isinstance(codec, DescribesTokenizer) else {}
    return {
        "default_generation_settings": {"n_ctx": card.max_model_len, "params": DEFAULTS},
        "total_slots": card.max_sequences,
        "model_path": shown_path(context, request, card.path),
        "model_alias": context.base_names[0],
        "chat_template": info.get("chat_template") or "",
        "bos_token": info.get("bos_token") or "",
        "eos_token": info.get("eos_token") or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"loramux {__version__}",
        "is_sleeping": context.backend.health is not Health.READY,
    }
