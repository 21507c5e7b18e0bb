"""POST /v1/run: run an artifact on an input, and return the output with its receipt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

from msgspec import UNSET
from starlette.responses import Response

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.generate.asked import Asked
from loramux.server.generate.generation import (
    Deltas,
    Generation,
    RouteKind,
    collect,
    run,
)
from loramux.server.generate.prompts import check_characters, encode_prompt
from loramux.server.generate.receipt_draft import ReceiptDraft, UsageCount, receipt_draft
from loramux.server.generate.requests import open_own, read_own
from loramux.server.generate.selection import ModelReference, combination_of
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import generating
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import DONE, Events, event, stream_events, until_gone
from loramux.server.naming.names import Selected
from loramux.types.composition import sum_text
from loramux.wire.text import RunAnswer, RunChunk, RunRequest

RUN = RouteKind(
    id_prefix="run",
    prompt_param="input",
    default_max_tokens=None,
)


def run_routes(context: Context) -> list[Route]:
    routes = Routes("artifacts")

    @routes.post("/v1/run", generating(RunRequest, RunAnswer))
    async def run_artifact(request: Call) -> Response:
        """Run an artifact of the registry, or an adapter by its name, on an input."""
        with receipt_draft(context.receipts, context.base_identity, request) as draft:
            generation = await _open_run(context, request, draft)
        artifact = artifact_name(generation.request.selected)
        deltas = run(context, generation)
        if generation.request.stream:
            return await stream_events(request, _events(generation, deltas, artifact))
        choices, usage = await until_gone(request, collect(generation, deltas))
        return json_response(
            RunAnswer(
                id=generation.request.id,
                artifact=artifact,
                output=choices[0].text,
                finish_reason=choices[0].finish_reason,
                usage=usage,
                serving=generation.draft.receipt or UNSET,
            )
        )

    return routes.found


async def _open_run(context: Context, http: Call, draft: ReceiptDraft) -> Generation:
    body, raw = await read_own(context, http, RunRequest)
    reference = ModelReference(
        body.artifact,
        body.adapters,
        body.adapter_weights,
        param="artifact",
        own_base_only=True,
        combination=combination_of(body),
    )
    draft.asked = str(reference) or None
    _check_fields(body)
    asked = Asked(kind=RUN, body=body, prompts=[partial(_encode, body)], selected=reference)
    return await open_own(context, http, draft, asked, raw)


def artifact_name(selected: Selected) -> str:
    """Return the resolved names with their versions and weights; the name of the base if it
    answers.
    """
    terms = [(adapter.full_name, adapter.weight) for adapter in selected.adapters]
    return sum_text(terms) or selected.model


def _check_fields(request: RunRequest) -> None:
    if request.model is not None:
        raise InvalidRequest("model is not allowed here: give artifact.", param="model")
    if request.artifact is None and request.adapters is None:
        raise InvalidRequest("Give artifact, or adapters.", param="artifact")
    if request.artifact is not None and request.adapters is not None:
        raise InvalidRequest("Give either artifact or adapters, not both.", param="adapters")
    if request.n not in (None, 1):
        raise InvalidRequest("A run has one output: leave n out.", param="n")


def _encode(request: RunRequest, codec: TextCodec, max_model_len: int) -> Sequence[int]:
    if request.raw:
        return encode_prompt(
            codec, request.input, max_model_len=max_model_len, add_special_tokens=True
        )
    check_characters(len(request.input), max_model_len, "input")
    return codec.apply_chat_template([{"role": "user", "content": request.input}])


async def _events(generation: Generation, deltas: Deltas, artifact: str) -> Events:
    """Events with parts of the output; the last one has usage and receipt instead."""
    count = UsageCount(generation.engine_requests)
    finish_reason: str | None = None
    async with aclosing(deltas):
        async for request_index, delta in deltas:
            count.add(request_index, delta)
            if delta.finish_reason is not None:
                finish_reason = delta.finish_reason.value
            yield event(RunChunk(id=generation.request.id, artifact=artifact, output=delta.text))
    yield event(
        RunChunk(
            id=generation.request.id,
            artifact=artifact,
            output="",
            finish_reason=finish_reason,
            usage=count.usage(),
            serving=generation.draft.receipt or UNSET,
        )
    )
    yield DONE
