"""From a request's bytes to jobs for the engine: the part that both generating routes share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace
from starlette.requests import Request

from loramux.errors import InvalidRequest
from loramux.server.body import decode, read_body
from loramux.server.context import Context
from loramux.server.generation import Answer
from loramux.server.names import Selected
from loramux.server.prompts import check_token_ids, room_for_answer
from loramux.server.refusals import Draft
from loramux.server.sampling import (
    AskedLength,
    asked_length,
    check_stream_options,
    refuse_unsupported,
    sampling_params,
)
from loramux.server.selection import Asker, select
from loramux.server.serving import Arrival, Served, ServingRecord
from loramux.server.terms import Terms, read_terms
from loramux.server.wire import GenerationRequest, StreamOptions
from loramux.types.request import Request as EngineRequest
from loramux.types.sampling import SamplingParams

RequestT = TypeVar("RequestT", bound=GenerationRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake(Generic[RequestT]):
    """A request whose fields are all right; its prompt has not been looked at yet."""

    http: Request
    arrival: Arrival
    request: RequestT
    selected: Selected
    params: SamplingParams
    length: AskedLength
    terms: Terms
    num_body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKind:
    """What differs between the routes once there are token ids."""

    id_prefix: str
    param: str
    default_max_tokens: int | None
    """None: all that fits."""


async def take_in(
    context: Context, http: Request, kind: type[RequestT], draft: Draft
) -> Intake[RequestT]:
    body = await read_body(http, context.options.max_body_bytes)
    request = decode(body, kind)
    draft.read(request)
    refuse_unsupported(body, request)
    check_stream_options(request)
    terms = read_terms(http.headers, request, tenant_header=context.options.tenant_header)
    context.require_ready()
    params = sampling_params(request, vocab_size=context.backend.card.vocab_size)
    length = asked_length(request)
    asker = Asker(tenant=terms.tenant, user=request.user)
    draft.selected = selected = await select(context, request, asker=asker)
    return Intake(
        http=http,
        arrival=draft.arrival,
        request=request,
        selected=selected,
        params=params,
        length=length,
        terms=terms,
        num_body_bytes=len(body),
    )


def make_answer(
    context: Context,
    intake: Intake[RequestT],
    prompts: Sequence[Sequence[int]],
    kind: PromptKind,
) -> Answer:
    answer_id = f"{kind.id_prefix}-{uuid.uuid4().hex}"
    streaming = intake.request.stream_options or StreamOptions()
    include_usage = bool(streaming.include_usage)
    options, selected, terms = context.options, intake.selected, intake.terms
    jobs = tuple(
        EngineRequest(
            request_id=f"{answer_id}-{number}",
            prompt_token_ids=tuple(token_ids),
            params=_params_for(context, intake, token_ids, kind),
            selection=selected.selection,
            tenant=terms.tenant,
            tenant_share=options.tenant_shares.get(terms.tenant, 1.0),
            adapter_share=options.adapter_shares.get(selected.label or "", 1.0),
            cache_salt=terms.cache_salt,
            timeout_s=terms.timeout_s,
        )
        for number, token_ids in enumerate(prompts)
    )
    return Answer(
        answer_id=answer_id,
        created_s=int(time.time()),
        selected=selected,
        fingerprint=context.fingerprint,
        jobs=jobs,
        record=_open_record(context, intake, jobs),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(streaming.continuous_usage_stats),
    )


def _open_record(
    context: Context, intake: Intake[RequestT], jobs: Sequence[EngineRequest]
) -> ServingRecord:
    served = Served(
        base_name=context.base_names[0],
        base_digest=context.backend.card.digest,
        tenant=intake.terms.tenant,
        selected=intake.selected,
        arrival=intake.arrival,
    )
    record = ServingRecord(context.receipts, served, jobs)
    if context.receipts.is_on:
        # The response's header is written from it, whatever the response will be.
        intake.http.state.receipt_id = record.id
    return record


def check_num_choices(context: Context, intake: Intake[RequestT], num_prompts: int) -> None:
    num_choices, limit = num_prompts * intake.params.n, context.options.max_choices
    if num_choices > limit:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={intake.params.n} make {num_choices} answers; one "
            f"request may ask for {limit}. Send several requests.",
            param="prompt",
        )


def _params_for(
    context: Context, intake: Intake[RequestT], token_ids: Sequence[int], kind: PromptKind
) -> SamplingParams:
    card = context.backend.card
    max_tokens = room_for_answer(
        len(token_ids),
        intake.length,
        max_model_len=card.max_model_len,
        default=kind.default_max_tokens,
        param=kind.param,
    )
    check_token_ids(token_ids, vocab_size=card.vocab_size, param=kind.param)
    return replace(intake.params, max_tokens=max_tokens)
