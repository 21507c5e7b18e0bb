"""POST /v1/run: an artifact and an input, an output and its receipt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.generation import Answer, Deltas, collect, run_jobs
from loramux.server.intake import PromptKind, make_answer, take_in
from loramux.server.names import Selected, full_name
from loramux.server.openapi import generating
from loramux.server.prompts import check_characters, encode_prompt, off_loop
from loramux.server.refusals import noting_refusals
from loramux.server.serving_bodies import RunAnswer, RunChunk, RunRequest
from loramux.server.streaming import DONE, Events, event, stream_events, until_gone
from loramux.server.usage import UsageCount

RUN = PromptKind(id_prefix="run", param="input", default_max_tokens=None)


def run_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["artifacts"])

    @router.post("/v1/run", **generating(RunRequest, RunAnswer))
    async def run_artifact(request: Request) -> Response:
        """Runs an artifact of the registry, or an adapter by its name, on an input."""
        with noting_refusals(context, request) as draft:
            intake = await take_in(context, request, RunRequest, draft)
            _check_fields(intake.request)
            token_ids = await off_loop(
                intake.num_body_bytes, lambda: _encode(context, intake.request)
            )
            answer = make_answer(context, intake, [token_ids], RUN)
        artifact = artifact_name(intake.selected)
        deltas = run_jobs(context.backend, context.metrics, context.names, answer)
        if intake.request.stream:
            return await stream_events(request, _events(answer, deltas, artifact))
        choices, usage = await until_gone(request, collect(answer, deltas))
        return json_response(
            RunAnswer(
                id=answer.answer_id,
                artifact=artifact,
                output=choices[0].text,
                finish_reason=choices[0].finish_reason,
                usage=usage,
                serving=answer.record.receipt or UNSET,
            )
        )

    return router


def artifact_name(selected: Selected) -> str:
    return selected.model if selected.resolved is None else full_name(selected.resolved)


def _check_fields(request: RunRequest) -> None:
    for name in ("model", "adapters", "adapter_weights"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} has no place here: artifact decides.", param=name)
    if request.n not in (None, 1):
        raise InvalidRequest("A run has one output: leave n out.", param="n")


def _encode(context: Context, request: RunRequest) -> Sequence[int]:
    codec, max_model_len = context.backend.codec, context.backend.card.max_model_len
    if request.raw:
        return encode_prompt(
            codec, request.input, max_model_len=max_model_len, add_special_tokens=True
        )
    check_characters(len(request.input), max_model_len, "input")
    return codec.apply_chat_template([{"role": "user", "content": request.input}])


async def _events(answer: Answer, deltas: Deltas, artifact: str) -> Events:
    """Pieces of the output; the last event has none, but usage and receipt."""
    count = UsageCount(answer.jobs)
    finish_reason: str | None = None
    async with aclosing(deltas):
        async for job_index, delta in deltas:
            count.add(job_index, delta)
            if delta.finish_reason is not None:
                finish_reason = delta.finish_reason.value
            yield event(RunChunk(id=answer.answer_id, artifact=artifact, output=delta.text))
    yield event(
        RunChunk(
            id=answer.answer_id,
            artifact=artifact,
            output="",
            finish_reason=finish_reason,
            usage=count.usage(),
            serving=answer.record.receipt or UNSET,
        )
    )
    yield DONE
