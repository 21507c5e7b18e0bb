"""SGLang's native routes: generate, adapters, model info."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import Struct
from starlette.responses import PlainTextResponse, Response

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.fields import AskedConstraint
from loramux.server.context import Context
from loramux.server.errors import NotServed, error_info, shaped_response
from loramux.server.families.sglang_info import info_handlers
from loramux.server.generate.asked import (
    Asked,
    generation_body,
)
from loramux.server.generate.checked_fields import read_fields, read_inner
from loramux.server.generate.generation import Choice, Deltas, Generation, RouteKind, collect, run
from loramux.server.generate.prompts import split_prompts
from loramux.server.generate.receipt_draft import UsageCount, receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.sampling import LOWEST, Logprobs
from loramux.server.http.body import decode, json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.http.streaming import DONE, StreamForm, event, stream_events, until_gone
from loramux.server.live.warming import pin
from loramux.server.routes.runtime_lora import (
    LoadRequest,
    VllmError,
    load_named,
    unload_named,
)
from loramux.types.request import TokenLogprob

FAMILY = "sglang"
KIND = RouteKind(id_prefix="gen", prompt_param="text", default_max_tokens=128)
KEYS = frozenset({"text", "input_ids"})
# Fields that constrain the answer -> what they are.
CONSTRAINTS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
ANY_JSON = "$$ANY$$"


class SamplingFields(Struct, kw_only=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | None = None


class GenerateRequest(Struct, kw_only=True):
    inner: ClassVar = ("sampling_params", SamplingFields)
    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | None = None
    lora_path: str | list[str | None] | None = None


class AdapterChange(Struct, kw_only=True):
    lora_name: str
    lora_path: str = ""
    pinned: bool = False


def sglang_error(error: Exception) -> Response:
    info = error_info(error)
    status = 400 if isinstance(error, NotServed) else info.code
    return shaped_response(error, {"error": {"message": info.message}}, status)


def error_event(error: Exception) -> bytes:
    return event({"error": {"message": error_info(error).message}})


def sglang_routes(context: Context) -> list[Route]:
    async def generate(request: Call) -> Response:
        return await _generate(context, request)

    async def load(request: Call) -> Response:
        return await _change(context, request, is_load=True)

    async def unload(request: Call) -> Response:
        return await _change(context, request, is_load=False)

    async def health_generate(request: Call) -> Response:
        context.require_ready()
        await context.backend.probe(context.options.probe_timeout_s)
        return Response(status_code=200)

    async def flush_cache(request: Call) -> Response:
        return PlainTextResponse(
            "Nothing to flush: prefixes are kept by the content of adapters.\n"
        )

    def at(path: str, handler: Any, *methods: str, keys: frozenset[str] = frozenset()) -> Route:
        return Route(
            family=FAMILY,
            path=path,
            handler=handler,
            methods=methods or ("POST",),
            keys=keys,
            shape=sglang_error,
        )

    found = [
        at("/generate", generate, keys=KEYS),
        at("/health_generate", health_generate, "GET"),
        at("/flush_cache", flush_cache, "GET", "POST"),
        at("/reset_prefix_cache", flush_cache),
        *(at(path, handler, "GET") for path, handler in info_handlers(context).items()),
    ]
    if context.options.allow_runtime_lora_updating:
        found += [at("/load_lora_adapter", load), at("/unload_lora_adapter", unload)]
    return found


async def _generate(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, GenerateRequest)
    sampling = read_inner(context, request, "sampling_params", body.sampling_params, SamplingFields)
    prompts = _prompts(body)
    names = _names(body, len(prompts))
    form = _Form(body, is_list=_is_list(body, sampling))
    if len(set(names)) > 1:
        if body.stream:
            raise InvalidRequest(
                "lora_path must name one adapter for all prompts of a stream: send them apart.",
                param="lora_path",
            )
        # A selection belongs to a whole generation, so that each prompt is one of its own.
        opened = [
            await _open(context, request, body, sampling, [prompt], name)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        written = await until_gone(request, _all_answers(context, opened, form))
        return json_response([answer for answers in written for answer in answers])
    generation = await _open(context, request, body, sampling, prompts, names[0])
    if body.stream:
        events = _events(generation, run(context, generation), form)
        return await stream_events(request, events, StreamForm(on_error=error_event))
    answers = await until_gone(request, _answers(context, generation, form))
    return json_response(answers if form.is_list else answers[0])


def _prompts(body: GenerateRequest) -> list[str | list[int]]:
    if body.text is None and body.input_ids is not None:
        return split_prompts(body.input_ids)
    if body.text is None or body.input_ids is not None:
        raise InvalidRequest("Give either text or input_ids.", param="text")
    return split_prompts(body.text)


def _names(body: GenerateRequest, num_prompts: int) -> list[str | None]:
    if not isinstance(body.lora_path, list):
        return [body.lora_path or body.model] * num_prompts
    if len(body.lora_path) != num_prompts:
        raise InvalidRequest(
            f"lora_path has {len(body.lora_path)} entries for {num_prompts} prompts.",
            param="lora_path",
        )
    return body.lora_path


def _is_list(body: GenerateRequest, sampling: SamplingFields) -> bool:
    is_batch = isinstance(body.text, list) or isinstance((body.input_ids or [0])[0], list)
    return is_batch or (sampling.n or 1) > 1


async def _open(
    context: Context,
    request: Call,
    body: GenerateRequest,
    sampling: SamplingFields,
    prompts: list[str | list[int]],
    name: str | None,
) -> Generation:
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    copied = ("stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "n", "ignore_eos")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        return await open_asked(
            context,
            request,
            draft,
            Asked(
                kind=KIND,
                body=generation_body(
                    model=name,
                    max_tokens=sampling.max_new_tokens,
                    min_tokens=sampling.min_new_tokens,
                    seed=sampling.sampling_seed,
                    include_stop_str_in_output=sampling.no_stop_trim,
                    skip_special_tokens=sampling.skip_special_tokens,
                    stream=body.stream,
                    guided_whitespace_pattern=sampling.guided_whitespace_pattern,
                    **{key: getattr(sampling, key) for key in (*copied, *penalties)},
                ),
                prompts=prompts,
                logprobs=Logprobs(
                    body.top_logprobs_num if body.return_logprob else None,
                    body.top_logprobs_num if body.return_logprob and start >= 0 else None,
                ),
                constraint=_constraint(sampling),
            ),
        )


def _constraint(sampling: SamplingFields) -> AskedConstraint | None:
    given = [name for name in CONSTRAINTS if getattr(sampling, name)]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other.", param=given[1])
    if not given:
        return None
    name, value = given[0], getattr(sampling, given[0])
    if name == "json_schema" and value == ANY_JSON:
        return AskedConstraint("json_object", True, name)
    return AskedConstraint(CONSTRAINTS[name], value, name)


@dataclass(frozen=True, slots=True)
class _Form:
    """How answers are written."""

    body: GenerateRequest
    is_list: bool

    def answer(
        self, generation: Generation, at: int, choice: Choice, cached: int
    ) -> dict[str, Any]:
        n = generation.request.params.n
        one = generation.engine_requests[at // n]
        finish: dict[str, Any] | None = None
        if choice.finish_reason == "length":
            finish = {"type": "length", "length": one.params.max_tokens}
        elif choice.finish_reason:
            matched = choice.stop_reason
            if matched is None and choice.token_ids:
                matched = choice.token_ids[-1]
            finish = {"type": "stop", "matched": matched}
        meta = {
            "id": self.body.rid or f"{generation.request.id}-{at}",
            "finish_reason": finish,
            "prompt_tokens": len(one.prompt_token_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": cached,
            "weight_version": "default",
            "e2e_latency": generation.draft.timing.total_ms / 1000,
        }
        if self.body.return_logprob:
            meta |= self._logprobs(generation.request.codec, one.prompt_token_ids, choice)
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _logprobs(
        self, codec: TextCodec, prompt: tuple[int, ...], choice: Choice
    ) -> dict[str, Any]:
        start = self.body.logprob_start_len
        scored: list[TokenLogprob | None] = []
        if start is not None and start >= 0:
            scored = [None, *choice.prompt_logprobs][start:]
        ids = prompt[len(prompt) - len(scored) :] if scored else ()
        shown: dict[str, Any] = {
            "input_token_logprobs": [
                self._entry(codec, i, None if one is None else one.logprob)
                for i, one in zip(ids, scored, strict=True)
            ],
            "output_token_logprobs": [
                self._entry(codec, one.token_id, one.logprob) for one in choice.logprobs
            ],
        }
        if self.body.top_logprobs_num:
            shown["input_top_logprobs"] = [self._top(codec, one) for one in scored]
            shown["output_top_logprobs"] = [self._top(codec, one) for one in choice.logprobs]
        return shown

    def _entry(self, codec: TextCodec, token_id: int, logprob: float | None) -> list[Any]:
        text = codec.token_to_str(token_id) if self.body.return_text_in_logprobs else None
        return [None if logprob is None else max(logprob, LOWEST), token_id, text]

    def _top(self, codec: TextCodec, one: TokenLogprob | None) -> list[Any] | None:
        return None if one is None else [self._entry(codec, i, logprob) for i, logprob in one.top]


async def _all_answers(
    context: Context, opened: Sequence[Generation], form: _Form
) -> list[list[dict[str, Any]]]:
    """Run all generations at once; the first failure ends the others."""
    tasks = [asyncio.create_task(_answers(context, one, form)) for one in opened]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answers(context: Context, generation: Generation, form: _Form) -> list[dict[str, Any]]:
    choices, usage = await collect(generation, run(context, generation))
    cached = usage.prompt_tokens_details.cached_tokens
    return [form.answer(generation, at, choice, cached) for at, choice in enumerate(choices)]


async def _events(
    generation: Generation, deltas: Deltas, form: _Form
) -> AsyncGenerator[bytes, None]:
    """Every event has the text so far."""
    num_choices = len(generation.engine_requests) * generation.request.params.n
    choices = [Choice() for _ in range(num_choices)]
    count = UsageCount(generation.engine_requests)
    async with aclosing(deltas):
        async for index, delta in deltas:
            count.add(index, delta)
            at = generation.choice_index(index, delta)
            choices[at].add(delta)
            cached = count.usage().prompt_tokens_details.cached_tokens
            answer = form.answer(generation, at, choices[at], cached)
            yield event(answer | {"index": at} if form.is_list else answer)
    yield DONE


async def _change(context: Context, request: Call, *, is_load: bool) -> Response:
    raw = await read_body(request, context.options.max_body_bytes)
    asked = decode(raw, AdapterChange)
    name = asked.lora_name
    try:
        async with context.name_locks.held(name):
            if is_load:
                await _load(context, request, asked)
            else:
                await unload_named(context, request, name)
        message = ""
    except VllmError as error:
        message = str(error)
    loaded = {given.name: given.path for given in context.names.given()}
    reply = {
        "rid": None,
        "http_worker_ipc": None,
        "success": not message,
        "error_message": message,
        "loaded_adapters": loaded,
    }
    return json_response(reply, status=400 if message else 200)


async def _load(context: Context, http: Call, asked: AdapterChange) -> None:
    name = asked.lora_name
    given = context.names.find(name)
    if given is not None and given.state != "failed":
        raise VllmError(400, "", f"Failed to load LoRA adapter {name} because it is already loaded")
    await load_named(context, http, LoadRequest(lora_name=name, lora_path=asked.lora_path))
    given = context.names.find(name)
    if asked.pinned and given is not None and given.cid is not None:
        await pin(context, http, name, [given.cid], pinned=True)
