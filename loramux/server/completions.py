"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loramux.backend import Delta, TextCodec
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.generation import Answer, Choice, Deltas, collect, run_jobs
from loramux.server.intake import Intake, PromptKind, check_num_choices, make_answer, take_in
from loramux.server.logprobs import CompletionLogprobsWriter
from loramux.server.openapi import generating
from loramux.server.prompts import encode_prompt, off_loop, split_prompts
from loramux.server.refusals import noting_refusals
from loramux.server.serving_bodies import ServedCompletion
from loramux.server.streaming import DONE, Events, event, stream_events, until_gone
from loramux.server.usage import UsageCount
from loramux.server.wire import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from loramux.types.request import Request as EngineRequest
from loramux.types.request import TokenLogprob

COMPLETION = PromptKind(id_prefix="cmpl", param="prompt", default_max_tokens=16)


def completion_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", **generating(CompletionRequest, ServedCompletion))
    async def create_completion(request: Request) -> Response:
        """Goes on from one or several prompts, whole or as a stream of chunks."""
        backend = context.backend
        with noting_refusals(context, request) as draft:
            intake = await take_in(context, request, CompletionRequest, draft)
            prompts = split_prompts(intake.request.prompt)
            check_num_choices(context, intake, len(prompts))
            token_ids = await off_loop(
                intake.num_body_bytes, lambda: _encode_all(context, intake, prompts)
            )
            answer = make_answer(context, intake, token_ids, COMPLETION)
        writers = _writers(intake, answer, prompts, backend.codec)
        deltas = run_jobs(backend, context.metrics, context.names, answer)
        if intake.request.stream:
            return await stream_events(request, _events(answer, deltas, writers))
        choices, usage = await until_gone(request, collect(answer, deltas))
        return json_response(_whole(answer, choices, usage, writers))

    return router


class ChoiceWriter:
    """One choice, with the prompt before it where `echo` asks for it."""

    def __init__(self, job: EngineRequest, codec: TextCodec, echoed: str | None) -> None:
        self._job = job
        self._codec = codec
        self._echoed = echoed
        self._logprobs = CompletionLogprobsWriter(codec)
        self._is_first = True

    def write(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob],
    ) -> CompletionChoice:
        echoes = self._is_first and self._echoed is not None
        self._is_first = False
        shown = None
        if self._job.params.logprobs is not None:
            shown = self._write_logprobs(logprobs, prompt_logprobs if echoes else None)
        return CompletionChoice(
            index=index, text=(self._echoed or "") + text if echoes else text, logprobs=shown
        )

    def _write_logprobs(
        self,
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob] | None,
    ) -> CompletionLogprobs:
        if prompt_logprobs is None:
            return self._logprobs.write(logprobs)
        first = self._job.prompt_token_ids[0]
        return self._logprobs.write([*prompt_logprobs, *logprobs], first_prompt_token=first)


def _encode_all(
    context: Context, intake: Intake[CompletionRequest], prompts: Sequence[str | list[int]]
) -> list[Sequence[int]]:
    return [
        encode_prompt(
            context.backend.codec,
            prompt,
            max_model_len=context.backend.card.max_model_len,
            add_special_tokens=intake.request.add_special_tokens is not False,
        )
        for prompt in prompts
    ]


def _writers(
    intake: Intake[CompletionRequest],
    answer: Answer,
    prompts: Sequence[str | list[int]],
    codec: TextCodec,
) -> list[ChoiceWriter]:
    writers = []
    for prompt, job in zip(prompts, answer.jobs, strict=True):
        echoed = _text_of(prompt, codec, job) if intake.request.echo else None
        writers += [ChoiceWriter(job, codec, echoed) for _ in range(job.params.n)]
    return writers


def _text_of(prompt: str | list[int], codec: TextCodec, job: EngineRequest) -> str:
    if isinstance(prompt, str):
        return prompt
    return codec.decode(prompt, skip_special_tokens=job.params.skip_special_tokens)


def _whole(
    answer: Answer, choices: list[Choice], usage: Usage, writers: list[ChoiceWriter]
) -> ServedCompletion:
    written = []
    for index, (choice, writer) in enumerate(zip(choices, writers, strict=True)):
        shown = writer.write(index, choice.text, choice.logprobs, choice.prompt_logprobs)
        shown.finish_reason, shown.stop_reason = choice.finish_reason, choice.stop_reason
        written.append(shown)
    whole = _completion(answer, written, usage)
    whole.serving = answer.record.receipt or UNSET
    return whole


async def _events(answer: Answer, deltas: Deltas, writers: list[ChoiceWriter]) -> Events:
    count = UsageCount(answer.jobs)
    async with aclosing(deltas):
        async for job_index, delta in deltas:
            count.add(job_index, delta)
            index = answer.choice_index(job_index, delta)
            choice = _chunk_choice(writers[index], index, delta)
            usage = count.usage() if answer.continuous_usage else None
            yield event(_completion(answer, [choice], usage))
    if answer.include_usage:
        yield event(_completion(answer, [], count.usage()))
    if answer.record.is_streamed:
        last = _completion(answer, [], None)
        last.serving = answer.record.receipt or UNSET
        yield event(last)
    yield DONE


def _chunk_choice(writer: ChoiceWriter, index: int, delta: Delta) -> CompletionChoice:
    choice = writer.write(index, delta.text, delta.logprobs or (), delta.prompt_logprobs or ())
    if delta.finish_reason is not None:
        choice.finish_reason = delta.finish_reason.value
        choice.stop_reason = delta.stop_reason
    return choice


def _completion(
    answer: Answer, choices: list[CompletionChoice], usage: Usage | None
) -> ServedCompletion:
    completion = ServedCompletion(
        id=answer.answer_id,
        created=answer.created_s,
        model=answer.selected.model,
        system_fingerprint=answer.fingerprint,
        choices=choices,
    )
    if usage is not None:
        completion.usage = usage
    return completion
