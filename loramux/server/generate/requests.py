"""From what a body of any API asks for to a GenerationRequest, and to engine requests."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.auth.quotas import Admission
from loramux.server.chat.structured.check import enforceable_grammar, grammar_of
from loramux.server.chat.structured.fields import json_options
from loramux.server.chat.tools.chat import ChatPlan, ReplyFormat
from loramux.server.context import Context
from loramux.server.generate.asked import Asked, encode, plan_asked
from loramux.server.generate.checked_fields import check_fields
from loramux.server.generate.fim import Filler, FillPrompt
from loramux.server.generate.generation import (
    Generation,
    GenerationRequest,
    check_num_choices,
    open_generation,
)
from loramux.server.generate.prompts import off_loop
from loramux.server.generate.receipt_draft import ReceiptDraft
from loramux.server.generate.sampling import (
    MaxTokens,
    bad_words_of,
    check_stream_options,
    max_tokens_of,
    sampling_params,
)
from loramux.server.generate.selection import (
    ModelReference,
    check_base,
    codec_for,
    select,
    vocab_size_for,
)
from loramux.server.http.body import decode, read_body, yield_after
from loramux.server.http.call import Call
from loramux.server.naming.names import Selected
from loramux.types.caller import Caller
from loramux.types.request import NOT_GENERATIVE
from loramux.types.sampling import SamplingParams
from loramux.wire.text import GenerationBody, StreamOptions

BodyT = TypeVar("BodyT", bound=GenerationBody)

# The prefix cache keeps a salt as long as its prefixes.
MAX_SALT_CHARACTERS = 1024
# Receipts keep it.
MAX_USER_CHARACTERS = 1024


async def read_own(context: Context, http: Call, kind: type[BodyT]) -> tuple[BodyT, bytes]:
    """Return a body of the server's own API, and its bytes."""
    raw = await read_body(http, context.options.max_body_bytes)
    return decode(raw, kind), raw


async def open_own(
    context: Context, http: Call, draft: ReceiptDraft, asked: Asked, raw: bytes
) -> Generation:
    """Open a generation of the own API, whose errors about fields are on the receipt too."""
    draft.asked = asked.shown_name
    await yield_after(len(raw))
    check_fields(context, http, type(asked.body), raw, num_choices=asked.body.n or 1)
    return await open_asked(context, http, draft, asked)


async def open_asked(context: Context, http: Call, draft: ReceiptDraft, asked: Asked) -> Generation:
    """Check what is asked, resolve its adapters, tokenize it, and make the engine requests."""
    body, kind = asked.body, asked.kind
    draft.asked = asked.shown_name
    check_stream_options(body)
    caller = replace(http.caller, user=_user(body.user))
    cache_salt, timeout_s = _cache_salt(body.cache_salt), _timeout_s(body.timeout)
    context.require_ready()
    if not (kind.pools or context.backend.card.pooling.generates):
        raise InvalidRequest(
            f"{NOT_GENERATIVE} Post to /v1/embeddings or /classify.", param="model"
        )
    admission = _open_admission(context, http, caller)
    max_tokens = max_tokens_of(body)
    draft.selected = selected = await _selected(context, http, asked.reference, caller)
    vocab_size = vocab_size_for(context, selected)
    params = sampling_params(body, asked.logprobs, vocab_size=vocab_size)
    tokenizers = context.names.tokenizers_of(selected)
    codec = await codec_for(context, selected)
    params = await _constrained(context, asked, params, codec)
    plan = await plan_asked(context, asked, params, codec)
    prompts = await _encoded(context, http, asked, plan, codec, max_tokens)
    reply = ReplyFormat()
    if plan is not None:
        http.facts.tool_notes = plan.notes
        reply = plan.reply
        params = reply.constrain(params)
    streaming = body.stream_options or StreamOptions()
    request = GenerationRequest(
        id=f"{kind.id_prefix}-{uuid.uuid4().hex}",
        kind=kind,
        caller=caller,
        admission=admission,
        selected=selected,
        codec=codec,
        tokenizers=tokenizers,
        vocab_size=vocab_size,
        pooling=asked.pooling,
        params=params,
        max_tokens=max_tokens,
        prompts=prompts,
        cache_salt=cache_salt,
        timeout_s=timeout_s,
        stream=bool(body.stream),
        include_usage=bool(streaming.include_usage),
        continuous_usage=bool(streaming.include_usage and streaming.continuous_usage_stats),
        report=asked.report,
        reply=reply,
    )
    return open_generation(context, http, request, draft)


async def _constrained(
    context: Context, asked: Asked, params: SamplingParams, codec: TextCodec
) -> SamplingParams:
    """Add what bounds the answer: a grammar, forbidden words, and the end of a hole."""
    body = asked.body
    grammar = await grammar_of(body)
    if body.bad_words:
        words = await _bad_words(context, body, codec)
        params = structs.replace(params, bad_words_token_ids=words)
    check_num_choices(context, params.n, asked.num_prompts)
    if asked.constraint is not None:
        constraint = replace(asked.constraint, options=json_options(body))
        grammar = await enforceable_grammar(constraint)
    if grammar is not None:
        params = structs.replace(params, grammar=grammar.encode())
    if any(isinstance(prompt, FillPrompt) for prompt in asked.prompts):
        params = Filler(codec).end(params)
    return params


async def _encoded(  # noqa: PLR0913  (what the token ids depend on)
    context: Context,
    http: Call,
    asked: Asked,
    plan: ChatPlan | None,
    codec: TextCodec,
    max_tokens: MaxTokens,
) -> tuple[tuple[int, ...], ...]:
    truncation = replace(asked.truncation, max_tokens=max_tokens)
    max_model_len = context.backend.card.max_model_len

    def encode_all() -> tuple[tuple[int, ...], ...]:
        encoded = encode(asked, plan, codec, max_model_len)
        return tuple(tuple(truncation.cut(ids, max_model_len)) for ids in encoded)

    return await off_loop(
        http.facts.body_bytes, encode_all, codec=codec, base=context.backend.codec
    )


async def _bad_words(
    context: Context, body: GenerationBody, codec: TextCodec
) -> tuple[tuple[int, ...], ...]:
    return await off_loop(
        sum(map(len, body.bad_words or ())),
        lambda: bad_words_of(body, codec),
        codec=codec,
        base=context.backend.codec,
    )


async def _selected(
    context: Context, http: Call, reference: ModelReference | Selected, caller: Caller
) -> Selected:
    """Return the selection of a reference, which the caller may use."""
    if isinstance(reference, ModelReference):
        selected = await select(context, reference, caller=caller)
        if reference.names_nothing and not selected.adapters:
            note_no_model(context, http, reference.param)
    else:
        selected = reference
    check_base(selected, caller)
    return selected


def note_no_model(context: Context, http: Call, param: str) -> None:
    """Warns that the base answers a request that chose nothing, or refuses the request."""
    base = context.base_names[0]
    if context.options.require_model:
        raise InvalidRequest(
            f"This server was started with --require-model: send {param} with the name of an "
            f"adapter, or {base} for the base.",
            param=param,
        )
    if context.names.may_have_adapters:
        http.warn(f"no {param} was named: the base {base} answered")


def _user(user: str | None) -> str | None:
    if user is not None and len(user) > MAX_USER_CHARACTERS:
        raise InvalidRequest(
            f"user has {len(user)} characters; at most {MAX_USER_CHARACTERS} are allowed.",
            param="user",
        )
    return user


def _open_admission(context: Context, http: Call, caller: Caller) -> Admission | None:
    """Refuse a request that could not begin now, before the work of tokenizing it."""
    admission = context.quotas.open(context.tenant_of(caller), caller.key_id)
    if admission is not None:
        http.facts.limits = admission.headers
        admission.check()
    return admission


def _cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters, got {len(salt)}.",
            param="cache_salt",
        )
    return salt


def _timeout_s(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InvalidRequest(
            f"timeout must be a number of seconds over 0, got {timeout_s:g}.", param="timeout"
        )
    return timeout_s
