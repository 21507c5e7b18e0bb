"""From an HTTP body to a GenerationRequest: the steps that all generating routes share."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.auth.quotas import Admission
from loramux.server.chat.structured.check import grammar_of
from loramux.server.context import Context
from loramux.server.generate.checked_fields import check_fields
from loramux.server.generate.generation import GenerationRequest, RouteKind
from loramux.server.generate.prompts import off_loop
from loramux.server.generate.receipt_draft import ReceiptDraft
from loramux.server.generate.sampling import (
    Logprobs,
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
from loramux.wire.text import GenerationBody, StreamOptions

BodyT = TypeVar("BodyT", bound=GenerationBody)

# The prefix cache keeps a salt as long as its prefixes.
MAX_SALT_CHARACTERS = 1024
# Receipts keep it.
MAX_USER_CHARACTERS = 1024


async def read_generation_body(
    context: Context, http: Call, body_type: type[BodyT]
) -> tuple[BodyT, bytes]:
    """The decoded body and its bytes."""
    raw = await read_body(http, context.options.max_body_bytes)
    return decode(raw, body_type), raw


async def resolve_request(  # noqa: PLR0913  (what differs between the routes)
    context: Context,
    http: Call,
    draft: ReceiptDraft,
    body: GenerationBody,
    kind: RouteKind,
    *,
    raw: bytes | None,
    reference: ModelReference | Selected,
    logprobs: Logprobs,
) -> GenerationRequest:
    """The request with its adapter resolved and its fields checked; it has no prompts yet.

    `raw`: the body's bytes; None if its unknown fields were checked before.
    """
    if raw is not None:
        await yield_after(len(raw))
        check_fields(context, http, type(body), raw, num_choices=body.n or 1)
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
    draft.selected = selected = await _selected(context, http, reference, caller)
    vocab_size = vocab_size_for(context, selected)
    params = sampling_params(body, logprobs, vocab_size=vocab_size)
    tokenizers = context.names.tokenizers_of(selected)
    codec = await codec_for(context, selected)
    grammar = await grammar_of(body)
    if grammar is not None:
        params = structs.replace(params, grammar=grammar.encode())
    if body.bad_words:
        words = await _bad_words(context, body, codec)
        params = structs.replace(params, bad_words_token_ids=words)
    streaming = body.stream_options or StreamOptions()
    return GenerationRequest(
        id=f"{kind.id_prefix}-{uuid.uuid4().hex}",
        kind=kind,
        caller=caller,
        admission=admission,
        selected=selected,
        codec=codec,
        tokenizers=tokenizers,
        vocab_size=vocab_size,
        params=params,
        max_tokens=max_tokens,
        cache_salt=cache_salt,
        timeout_s=timeout_s,
        stream=bool(body.stream),
        include_usage=bool(streaming.include_usage),
        continuous_usage=bool(streaming.include_usage and streaming.continuous_usage_stats),
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
    """Returns the selection of a reference, which the caller may use."""
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
