"""Bodies of LoRAX's and TGI's native routes, and their errors."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from loramux.adapters.recipe import ONLY_ALONE, UNEQUAL_RANKS
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    DoesNotFit,
    EngineBusy,
    EngineStopped,
    InvalidRequest,
    LoramuxError,
    RateLimited,
    Refusal,
    RequestTimeout,
    SourceFailed,
    SourceNotFound,
    SourceRefused,
)
from loramux.server.context import Context
from loramux.server.errors import (
    BodyTooLarge,
    Forbidden,
    NotJson,
    NotServed,
    Unauthenticated,
    error_info,
    shaped_response,
)
from loramux.server.generate.selection import ModelReference, hint_for, select
from loramux.server.http.call import Call
from loramux.server.http.streaming import event
from loramux.server.naming.names import Selected
from loramux.sources.config import Secret
from loramux.sources.refusals import SourceCode


class MergedAdapters(Struct, kw_only=True):
    ids: list[str]
    weights: list[float] = []
    merge_strategy: str | None = None
    density: float | None = None
    majority_sign_method: str | None = None


class Source(Struct, kw_only=True):
    """The adapter that a request names, and where it is fetched from."""

    adapter_id: str | None = None
    adapter_source: str | None = None
    api_token: str | None = None


class Parameters(Source, kw_only=True):
    """Fields of `parameters`; TGI's are among them."""

    merged_adapters: MergedAdapters | None = None
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    ignore_eos_token: bool = False
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    return_k_alternatives: int | None = None
    top_n_tokens: int | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    grammar: dict[str, Any] | None = None
    guided_whitespace_pattern: str | None = None
    apply_chat_template: bool = False


class GenerateRequest(Struct, kw_only=True):
    inner: ClassVar = ("parameters", Parameters)
    inputs: str
    model: str | None = None
    parameters: dict[str, Any] | None = None
    stream: bool = False


class TokenizeInputs(Struct, kw_only=True):
    inputs: str
    add_special_tokens: bool | None = None
    parameters: dict[str, Any] | None = None
    stream: bool | None = None


class InputToken(Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None


class TopToken(Struct, kw_only=True):
    id: int
    text: str
    logprob: float
    special: bool = False


class Token(Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None
    special: bool
    alternative_tokens: list[TopToken] | UnsetType = UNSET
    skipped: bool = False


class Sequence(Struct, kw_only=True):
    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[InputToken]
    tokens: list[Token]
    top_tokens: list[list[TopToken]] | UnsetType = UNSET


class Details(Struct, kw_only=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int = 0
    seed: int | None
    prefill: list[InputToken]
    tokens: list[Token]
    top_tokens: list[list[TopToken]] | UnsetType = UNSET
    best_of_sequences: list[Sequence] | UnsetType = UNSET


class GenerateAnswer(Struct, kw_only=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct, kw_only=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    input_length: int
    """TGI's word for prompt_tokens."""


class StreamAnswer(Struct, kw_only=True):
    index: int
    token: Token
    top_tokens: list[TopToken] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class TokenPlace(Struct, kw_only=True):
    id: int
    text: str
    start: int
    stop: int


class Failure(Struct, kw_only=True):
    error: str
    error_type: str


VALIDATION, GENERATION = "validation", "generation"
_INVALID = "Input validation error: "
_KINDS: tuple[tuple[tuple[type[Exception], ...], int, str, str], ...] = (
    ((InvalidRequest, DoesNotFit, BodyTooLarge, NotJson), 422, VALIDATION,
     _INVALID),
    ((Unauthenticated,), 401, "authentication", ""),
    ((Forbidden,), 403, "permission", ""),
    ((EngineBusy,), 429, "overloaded", "Model is overloaded. "),
    ((RateLimited,), 429, "overloaded", ""),
    ((EngineStopped,), 503, GENERATION, "Request failed during generation: "),
    ((NotServed, AdapterNotFound, AdapterRefused), 424, GENERATION,
     "Request failed during generation: "),
    ((SourceRefused, SourceNotFound, SourceFailed, RequestTimeout), 424, GENERATION,
     "Request failed during generation: "),
    ((LoramuxError,), 500, "incomplete_generation", "Incomplete generation: "),
)  # fmt: skip


# Refusals of what the request says, not of an adapter's bytes.
_OF_THE_REQUEST = (
    *(ONLY_ALONE, UNEQUAL_RANKS),
    *(SourceCode.BAD_FORM, SourceCode.NOT_ENABLED, SourceCode.UNKNOWN_SOURCE),
)


def failure_of(error: Exception) -> tuple[int, Failure]:
    """Return the status and the body that LoRAX gives an error."""
    info = error_info(error)
    if isinstance(error, Refusal) and error.code in _OF_THE_REQUEST:
        return 422, Failure(error=_INVALID + info.message, error_type=VALIDATION)
    for kinds, status, kind, start in _KINDS:
        if isinstance(error, kinds):
            return status, Failure(error=start + info.message, error_type=kind)
    return info.code, Failure(error=info.message, error_type="incomplete_generation")


def lorax_error(error: Exception) -> Response:
    status, failure = failure_of(error)
    return shaped_response(error, failure, status)


def failure_event(error: Exception) -> bytes:
    return event(failure_of(error)[1])


def streamed_error(error: Exception) -> Response:
    """Return a stream has status 200 from its beginning: the error is its only event."""
    return Response(failure_event(error), media_type="text/event-stream")


async def select_adapter(
    context: Context, request: Call, parameters: Source, name: str
) -> ModelReference | Selected:
    """Find an adapter as LoRAX names it.

    A name that the operator gave means that adapter whatever the source says; a name of the
    registry only if the request gives no source, so that neither can stand for the other.
    """
    context.require_ready()
    caller = request.caller
    view = context.view_of(caller)
    source, sources = parameters.adapter_source, context.sources
    is_found = source is not None and sources is not None and sources.has_named(name)
    is_given = view.sees_given(name) and context.names.find(name) is not None
    if name in context.base_names or (is_given and not is_found):
        return ModelReference(name, param="adapter_id")
    if source is None:
        reference = ModelReference(name, param="adapter_id")
        try:
            return await select(context, reference, caller=caller)
        except NotServed:
            source = context.options.adapter_source
    if source is None or sources is None or not view.may_fetch(source):
        hint = await hint_for(context, view, name)
        raise NotServed(
            f"The adapter `{name}` does not exist here.{hint} Send adapter_source (hub, local or "
            f"s3), or start the server with --adapter-source.{context.missed_registry}",
            param="adapter_id",
        )
    token = Secret(parameters.api_token) if parameters.api_token else None
    return await sources.find(name, source, token=token, tenant=caller.tenant)
