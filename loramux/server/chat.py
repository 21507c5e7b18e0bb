"""POST /v1/chat/completions"""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loramux.backend import Delta, TextCodec
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.generation import Answer, Choice, Deltas, collect, run_jobs
from loramux.server.intake import PromptKind, make_answer, take_in
from loramux.server.logprobs import chat_logprobs
from loramux.server.openapi import generating
from loramux.server.prompts import encode_messages, off_loop
from loramux.server.refusals import noting_refusals
from loramux.server.serving_bodies import ServedChat, ServedChatChunk
from loramux.server.streaming import DONE, Events, event, stream_events, until_gone
from loramux.server.usage import UsageCount
from loramux.server.wire import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    Usage,
)

CHAT = PromptKind(id_prefix="chatcmpl", param="messages", default_max_tokens=None)


def chat_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", **generating(ChatRequest, ServedChat))
    async def create_chat_completion(request: Request) -> Response:
        """Answers a conversation, whole or as a stream of chunks."""
        backend = context.backend
        with noting_refusals(context, request) as draft:
            intake = await take_in(context, request, ChatRequest, draft)
            token_ids = await off_loop(
                intake.num_body_bytes,
                lambda: encode_messages(
                    backend.codec, intake.request, max_model_len=backend.card.max_model_len
                ),
            )
            answer = make_answer(context, intake, [token_ids], CHAT)
        deltas = run_jobs(backend, context.metrics, context.names, answer)
        if intake.request.stream:
            return await stream_events(request, _events(answer, deltas, backend.codec))
        choices, usage = await until_gone(request, collect(answer, deltas))
        return json_response(_whole(answer, choices, usage, backend.codec))

    return router


def _whole(answer: Answer, choices: list[Choice], usage: Usage, codec: TextCodec) -> ServedChat:
    return ServedChat(
        id=answer.answer_id,
        created=answer.created_s,
        model=answer.selected.model,
        system_fingerprint=answer.fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=ChatMessage(content=choice.text),
                logprobs=(
                    None
                    if choice.job.params.logprobs is None
                    else chat_logprobs(codec, choice.logprobs)
                ),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage,
        serving=answer.record.receipt or UNSET,
    )


async def _events(answer: Answer, deltas: Deltas, codec: TextCodec) -> Events:
    begun: set[int] = set()
    count = UsageCount(answer.jobs)
    async with aclosing(deltas):
        async for job_index, delta in deltas:
            written = b""
            if delta.index not in begun:
                begun.add(delta.index)
                role = ChatDelta(role="assistant", content="")
                written = _chunk(answer, ChatChunkChoice(index=delta.index, delta=role), count)
            count.add(job_index, delta)
            yield written + _chunk(answer, _chunk_choice(delta, codec), count)
    if answer.include_usage:
        yield event(_chunk_of(answer, [], count.usage()))
    if answer.record.is_streamed:
        chunk = _chunk_of(answer, [], None)
        chunk.serving = answer.record.receipt or UNSET
        yield event(chunk)
    yield DONE


def _chunk(answer: Answer, choice: ChatChunkChoice, count: UsageCount) -> bytes:
    usage = count.usage() if answer.continuous_usage else None
    return event(_chunk_of(answer, [choice], usage))


def _chunk_of(
    answer: Answer, choices: list[ChatChunkChoice], usage: Usage | None
) -> ServedChatChunk:
    chunk = ServedChatChunk(
        id=answer.answer_id,
        created=answer.created_s,
        model=answer.selected.model,
        system_fingerprint=answer.fingerprint,
        choices=choices,
    )
    if usage is not None:
        chunk.usage = usage
    return chunk


def _chunk_choice(delta: Delta, codec: TextCodec) -> ChatChunkChoice:
    choice = ChatChunkChoice(index=delta.index, delta=ChatDelta(content=delta.text))
    if delta.logprobs is not None:
        choice.logprobs = chat_logprobs(codec, delta.logprobs)
    if delta.finish_reason is not None:
        choice.finish_reason = delta.finish_reason.value
        choice.stop_reason = delta.stop_reason
    return choice
