"""LoRAX's and TGI's native routes: generate, stream, tokenize and info."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response

from loramux import __version__
from loramux.adapters.recipe import METHODS
from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.chat.conversation import Conversation
from loramux.server.chat.structured.fields import AskedConstraint
from loramux.server.context import Context
from loramux.server.families.lorax_answers import (
    SequenceWriter,
    StreamWriter,
    answer_of,
    response_headers,
)
from loramux.server.families.lorax_embed import asks_for_features, embed, extract_features
from loramux.server.families.lorax_wire import (
    GenerateRequest,
    Parameters,
    TokenizeInputs,
    TokenPlace,
    failure_event,
    lorax_error,
    select_adapter,
    streamed_error,
)
from loramux.server.generate.asked import (
    Asked,
    generation_body,
)
from loramux.server.generate.checked_fields import read_fields, read_inner
from loramux.server.generate.generation import Deltas, Generation, RouteKind, collect, run
from loramux.server.generate.prompts import encode_prompt, off_loop
from loramux.server.generate.receipt_draft import ReceiptDraft, receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.sampling import Logprobs, Truncation
from loramux.server.generate.selection import ModelReference, codec_for, combination_of, select
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.http.streaming import StreamForm, event, stream_events, until_gone
from loramux.server.naming.names import Selected
from loramux.wire.text import GenerationBody

FAMILY = "lorax"
DEFAULT_MAX_NEW_TOKENS = 100
"""TGI's."""
KIND = RouteKind(id_prefix="gen", prompt_param="inputs", default_max_tokens=DEFAULT_MAX_NEW_TOKENS)
INPUTS = frozenset({"inputs"})


def lorax_routes(context: Context) -> list[Route]:
    async def compatible(request: Call) -> Response:
        return await answer_inputs(context, request)

    async def generate_one(request: Call) -> Response:
        return await generate(context, request)

    async def generate_stream(request: Call) -> Response:
        request.facts.shape = streamed_error
        return await generate(context, request, stream=True)

    async def tokenize(request: Call) -> Response:
        return await _tokenize(context, request)

    async def embed_text(request: Call) -> Response:
        return await embed(context, request)

    async def info(request: Call) -> Response:
        context.require_known()
        return json_response(_info(context))

    async def startup(request: Call) -> Response:
        """Generate a token, so that it tells more than /health."""
        context.require_ready()
        await context.backend.probe(context.options.probe_timeout_s)
        return Response(status_code=200)

    def get(path: str, handler: Any) -> Route:
        return Route(family=FAMILY, path=path, handler=handler, methods=("GET",), shape=lorax_error)

    def post(path: str, handler: Any, keys: frozenset[str] = frozenset()) -> Route:
        return Route(family=FAMILY, path=path, handler=handler, keys=keys, shape=lorax_error)

    return [
        post("/", compatible),
        post("/generate", generate_one, INPUTS),
        post("/generate_stream", generate_stream),
        post("/tokenize", tokenize, INPUTS),
        post("/embed", embed_text),
        get("/info", info),
        get("/startup", startup),
    ]


async def answer_inputs(context: Context, request: Call) -> Response:
    """Answers POST /: a generation, or the feature extraction of Hugging Face's clients."""
    if await asks_for_features(context, request):
        return await extract_features(context, request)
    return await generate(context, request, as_list=True)


async def generate(
    context: Context, request: Call, *, stream: bool | None = None, as_list: bool = False
) -> Response:
    """Generate; `stream` replaces the body's field, and `as_list` is the form of POST /."""
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        body = await read_fields(context, request, GenerateRequest)
        parameters = read_inner(context, request, "parameters", body.parameters, Parameters)
        if parameters.merged_adapters is None:
            parameters.adapter_id = parameters.adapter_id or body.model
        wants_stream = body.stream if stream is None else stream
        if wants_stream and as_list:
            request.facts.shape = streamed_error
        _check(parameters, wants_stream)
        asked = await _asked(context, request, draft, body.inputs, parameters, wants_stream)
        generation = await open_asked(context, request, draft, asked)
    codec, deltas = generation.request.codec, run(context, generation)
    prefix = body.inputs if parameters.return_full_text else ""
    if wants_stream:
        writer = StreamWriter(codec, parameters, prefix, len(generation.request.prompts[0]))
        headers = response_headers(context, generation, body.inputs)
        form = StreamForm(on_error=failure_event, headers=headers)
        return await stream_events(request, _events(generation, deltas, writer), form)
    choices, usage = await until_gone(request, collect(generation, deltas))
    writer_of = SequenceWriter(codec, parameters, prefix, generation.request.prompts[0])
    answer = answer_of(choices, writer_of)
    response = json_response([answer] if as_list else answer)
    response.headers.update(response_headers(context, generation, body.inputs, usage))
    return response


async def _asked(
    context: Context,
    request: Call,
    draft: ReceiptDraft,
    inputs: str,
    parameters: Parameters,
    stream: bool,
) -> Asked:
    body = _generation_body(parameters, stream)
    return Asked(
        kind=KIND,
        body=body,
        prompts=[inputs],
        chat=_chat(inputs) if parameters.apply_chat_template else None,
        selected=await _select(context, request, parameters, body, draft),
        logprobs=_logprobs(parameters, stream),
        truncation=Truncation(parameters.truncate),
        constraint=_constraint(parameters),
        name=parameters.adapter_id or "",
    )


def _check(parameters: Parameters, stream: bool) -> None:
    """Raise InvalidRequest for what LoRAX refuses, and for what cannot be honoured here."""
    best_of = 1 if parameters.best_of is None else parameters.best_of
    is_choice = best_of > 1
    faults: tuple[tuple[bool, str, str], ...] = (
        (best_of < 1, "best_of", "must be strictly positive"),
        (is_choice and not _samples(parameters), "best_of", "> 1 needs sampling"),
        (is_choice and parameters.seed is not None, "best_of", "> 1 does not go with `seed`"),
        (is_choice and stream, "best_of", "!= 1 is not supported when streaming tokens"),
        (parameters.typical_p not in (None, 1), "typical_p", "is not supported: leave it out"),
        (parameters.watermark, "watermark", "is not supported: leave it out"),
        *(
            (value is not None and value < 1, name, "must be strictly positive")
            for name in ("max_new_tokens", "top_k", "truncate")
            for value in (getattr(parameters, name),)
        ),
        ((parameters.seed or 0) < 0, "seed", "must be 0 or more"),
        (
            parameters.decoder_input_details and stream,
            "decoder_input_details",
            "== true is not supported when streaming tokens",
        ),
        (
            bool(parameters.adapter_id) and parameters.merged_adapters is not None,
            "adapter_id",
            "does not go with `merged_adapters`: at most one of them may be provided",
        ),
    )
    for is_wrong, param, problem in faults:
        if is_wrong:
            raise InvalidRequest(f"`{param}` {problem}", param=param)


def _samples(parameters: Parameters) -> bool:
    if parameters.temperature == 0:
        return False
    return parameters.do_sample or any(
        (
            parameters.temperature not in (None, 1),
            parameters.top_k is not None,
            parameters.top_p is not None and parameters.top_p < 1,
        )
    )


def _chat(inputs: str) -> Conversation:
    return Conversation(messages=[{"role": "user", "content": inputs}])


def _generation_body(parameters: Parameters, stream: bool) -> GenerationBody:
    samples = _samples(parameters)
    return generation_body(
        max_tokens=parameters.max_new_tokens,
        n=parameters.best_of,
        temperature=(parameters.temperature or 1.0) if samples else 0.0,
        top_p=parameters.top_p,
        top_k=parameters.top_k,
        seed=parameters.seed,
        repetition_penalty=parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        presence_penalty=parameters.presence_penalty,
        stop=parameters.stop,
        guided_whitespace_pattern=parameters.guided_whitespace_pattern,
        include_stop_str_in_output=True,
        ignore_eos=parameters.ignore_eos_token,
        stream=stream,
        **_merged(parameters),
    )


def _merged(parameters: Parameters) -> dict[str, Any]:
    """Return the fields of a combination; those without a meaning for the method are left out, as
    the client always sends them.
    """
    merged = parameters.merged_adapters
    if merged is None:
        return {}
    if not merged.ids:
        raise InvalidRequest(
            "at least one adapter ID must be provided when setting `merged_adapters`",
            param="merged_adapters",
        )
    if merged.weights and len(merged.weights) != len(merged.ids):
        raise InvalidRequest(
            "number of adapter IDs must match number of adapter weights", param="merged_adapters"
        )
    method = METHODS.get(merged.merge_strategy or "linear")
    prunes = method is None or method.pruning != "none"
    votes = method is None or method.votes
    return {
        "adapters": merged.ids,
        "adapter_weights": merged.weights or None,
        "combination": merged.merge_strategy or "linear",
        "density": merged.density if prunes else None,
        "majority_sign_method": merged.majority_sign_method if votes else None,
    }


def _logprobs(parameters: Parameters, stream: bool) -> Logprobs:
    """Streams and details report every token with its log probability."""
    top = max(parameters.return_k_alternatives or 0, parameters.top_n_tokens or 0)
    reports = stream or parameters.details or parameters.decoder_input_details
    picks = (parameters.best_of or 1) > 1
    return Logprobs(
        top if reports or picks else None, 0 if parameters.decoder_input_details else None
    )


def _constraint(parameters: Parameters) -> AskedConstraint | None:
    form, grammar = parameters.response_format, parameters.grammar
    if form is not None and form.get("type") != "text":
        schema, param = form.get("schema"), "response_format"
        if form.get("type") == "json_object" and schema is None:
            return AskedConstraint("json_object", True, param)
        if form.get("type") in ("json_object", "json_schema"):
            return AskedConstraint("json", schema, param)
        raise InvalidRequest(f"`{param}` has no type {form.get('type')!r}", param=param)
    if grammar is None:
        return None
    kind, value = grammar.get("type"), grammar.get("value")
    if kind == "json_schema" and isinstance(value, dict):
        # TGI writes the schema with a name around it.
        kind, value = "json", value.get("schema")
    if kind not in ("json", "regex"):
        raise InvalidRequest(f"`grammar` has no type {kind!r}", param="grammar")
    return AskedConstraint(str(kind), value, "grammar")


async def _select(
    context: Context,
    request: Call,
    parameters: Parameters,
    body: GenerationBody,
    draft: ReceiptDraft,
) -> ModelReference | Selected:
    if parameters.merged_adapters is not None:
        draft.asked = "+".join(parameters.merged_adapters.ids)
        names = [await _find_part(context, request, parameters, one) for one in body.adapters or ()]
        return ModelReference(None, names, body.adapter_weights, combination=combination_of(body))
    if not parameters.adapter_id:
        return ModelReference(None, param="adapter_id")
    draft.asked = parameters.adapter_id
    return await select_adapter(context, request, parameters, parameters.adapter_id)


async def _find_part(context: Context, request: Call, parameters: Parameters, name: str) -> str:
    """Return a name of one part of a combination, which the names know afterwards."""
    public = replace(parameters, api_token=None)
    found = await select_adapter(context, request, public, name)
    if isinstance(found, Selected) and found.adapters:
        return found.adapters[0].given or name
    return name


async def _events(
    generation: Generation, deltas: Deltas, writer: StreamWriter
) -> AsyncGenerator[bytes, None]:
    async with aclosing(deltas):
        async for _, delta in deltas:
            for answer in writer.write(delta):
                yield event(answer)


async def _tokenize(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, TokenizeInputs, generates=False)
    context.require_known()
    parameters = read_inner(context, request, "parameters", body.parameters, Parameters)
    codec, max_model_len = context.backend.codec, context.backend.card.max_model_len
    if parameters.adapter_id:
        found = await select_adapter(context, request, parameters, parameters.adapter_id)
        if isinstance(found, ModelReference):
            found = await select(context, found, caller=request.caller)
        codec = await codec_for(context, found)

    def work() -> list[TokenPlace]:
        token_ids = encode_prompt(
            codec,
            body.inputs,
            max_model_len=max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
        )
        return _places(codec, body.inputs, token_ids)

    places = await off_loop(len(body.inputs), work, codec=codec, base=context.backend.codec)
    return json_response(places)


def _places(codec: TextCodec, text: str, token_ids: Sequence[int]) -> list[TokenPlace]:
    """Tokens with the characters of the text that they stand for; special tokens have none."""
    places = []
    data = text.encode(errors="surrogatepass")
    at = num_begun = start = 0
    for token_id in token_ids:
        piece = codec.token_bytes(token_id)
        if piece and data.startswith(piece, at):
            at += len(piece)
            num_begun += sum(not _continues(byte) for byte in piece)
        # A character counts once its last byte is there.
        stop = num_begun - (at < len(data) and _continues(data[at]))
        shown = codec.token_to_str(token_id)
        places.append(TokenPlace(id=token_id, text=shown, start=start, stop=stop))
        start = stop
    return places


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 continues a character."""
    return byte & 0xC0 == 0x80


def _info(context: Context) -> Mapping[str, Any]:
    card = context.backend.card
    limit = card.max_model_len
    return {
        "model_id": context.base_names[0],
        "model_sha": card.digest.rpartition(":")[2],
        "model_dtype": card.dtype,
        "model_device_type": card.device.partition(":")[0],
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": context.options.max_choices,
        "max_best_of": 128,
        "max_stop_sequences": 64,
        "max_input_length": limit - 1,
        "max_input_tokens": limit - 1,
        "max_total_tokens": limit,
        "waiting_served_ratio": 0.0,
        "max_batch_total_tokens": card.num_pages * card.block_tokens,
        "max_waiting_tokens": 0,
        "max_client_batch_size": 1,
        "validation_workers": 1,
        "eager_prefill": False,
        "router": "loramux",
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "request_logger_url": None,
    }
