"""POST /v1/chat/completions and POST /v1/completions, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

from msgspec import UNSET
from starlette.responses import Response

from loramux.backend.text import Delta, TextCodec
from loramux.server.chat.conversation import Conversation, Tools
from loramux.server.chat.tools.writer import ChatWriter, write_message
from loramux.server.context import Context
from loramux.server.generate.asked import Asked
from loramux.server.generate.fim import FillPrompt, check_hole
from loramux.server.generate.generation import (
    Choice,
    Deltas,
    Generation,
    RouteKind,
    collect,
    num_reported,
    run,
)
from loramux.server.generate.prompts import off_loop, split_prompts
from loramux.server.generate.receipt_draft import ReceiptDraft, UsageCount, receipt_draft
from loramux.server.generate.requests import open_own, read_own
from loramux.server.generate.sampling import (
    LOWEST,
    TokenReport,
    chat_logprobs_of,
    completion_logprobs_of,
    prompt_logprobs,
    show_token,
    token_report,
    truncation_of,
)
from loramux.server.generate.selection import openai_reference
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import generating
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import DONE, Events, event, stream_events, until_gone
from loramux.types.request import TokenLogprob
from loramux.types.sampling import SamplingParams
from loramux.wire.text import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TopLogprob,
    Usage,
)

NO_REPORT = TokenReport()
# Writing one takes as long as tokenizing so many bytes.
BYTES_PER_LOGPROB = 8


def chat_logprobs(
    codec: TextCodec, logprobs: Sequence[TokenLogprob], report: TokenReport = NO_REPORT
) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_token(codec, entry, report) for entry in logprobs])


class CompletionLogprobsWriter:
    """Writes the log probabilities of one choice; text offsets continue across chunks."""

    def __init__(self, codec: TextCodec, report: TokenReport = NO_REPORT) -> None:
        self._show = partial(show_token, codec, report=report)
        self.offset = 0
        """Characters before the next token."""

    def write(
        self, logprobs: Sequence[TokenLogprob], *, first_prompt_token: int | None = None
    ) -> CompletionLogprobs:
        """Write tokens; `first_prompt_token` comes first and has no log probability."""
        written = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        if first_prompt_token is not None:
            self._add(written, first_prompt_token, None)
        for entry in logprobs:
            self._add(written, entry.token_id, entry)
        return written

    def _add(self, written: CompletionLogprobs, token_id: int, entry: TokenLogprob | None) -> None:
        token = self._show(token_id)
        written.tokens.append(token)
        written.text_offset.append(self.offset)
        written.token_logprobs.append(None if entry is None else max(entry.logprob, LOWEST))
        written.top_logprobs.append(None if entry is None else self._top(token, entry))
        self.offset += len(token)

    def _top(self, token: str, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            # Tokens that are parts of characters have equal text: keep the most likely one.
            top.setdefault(self._show(token_id), max(logprob, LOWEST))
        top.setdefault(token, max(entry.logprob, LOWEST))
        return top


def _chat_token(codec: TextCodec, entry: TokenLogprob, report: TokenReport) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=show_token(codec, entry.token_id, report),
        logprob=max(entry.logprob, LOWEST),
        bytes=list(codec.token_bytes(entry.token_id)),
        top_logprobs=[
            TopLogprob(
                token=show_token(codec, token_id, report),
                logprob=max(logprob, LOWEST),
                bytes=list(codec.token_bytes(token_id)),
            )
            for token_id, logprob in entry.top
        ],
    )


CHAT = RouteKind(
    id_prefix="chatcmpl",
    prompt_param="messages",
    default_max_tokens=None,
)


def chat_routes(context: Context) -> list[Route]:
    routes = Routes("OpenAI")

    @routes.post("/v1/chat/completions", generating(ChatRequest, ChatCompletion))
    async def create_chat_completion(request: Call) -> Response:
        """Generate the next message of a conversation, complete or as a stream of chunks."""
        return await answer_chat(context, request)

    return routes.found


async def answer_chat(context: Context, request: Call) -> Response:
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        generation = await _open_chat(context, request, draft)
    codec = generation.request.codec
    deltas = run(context, generation)
    if generation.request.stream:
        return await stream_events(request, chat_events(generation, deltas, codec))
    choices, usage = await until_gone(request, collect(generation, deltas))
    return await off_loop(
        BYTES_PER_LOGPROB * num_reported(choices),
        lambda: json_response(complete_chat(generation, choices, usage, codec)),
    )


async def _open_chat(context: Context, http: Call, draft: ReceiptDraft) -> Generation:
    body, raw = await read_own(context, http, ChatRequest)
    reference = openai_reference(context, body)
    draft.asked = str(reference) or None
    template = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template.setdefault("reasoning_effort", body.reasoning_effort)
    chat = Conversation(
        messages=body.messages,
        tools=Tools(body.tools, body.tool_choice, body.parallel_tool_calls is not False),
        template=template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        shows_reasoning=body.include_reasoning is not False,
    )
    asked = Asked(
        kind=CHAT,
        body=body,
        chat=chat,
        selected=reference,
        logprobs=chat_logprobs_of(body),
        truncation=truncation_of(body),
        report=token_report(body),
    )
    return await open_own(context, http, draft, asked, raw)


def complete_chat(
    generation: Generation, choices: list[Choice], usage: Usage, codec: TextCodec
) -> ChatCompletion:
    report = generation.request.report
    wants_logprobs = generation.request.params.logprobs is not None
    reply = generation.request.reply
    written = [write_message(reply, choice.text, choice.finish_reason) for choice in choices]
    answer = ChatCompletion(
        id=generation.request.id,
        created=generation.created_s,
        model=generation.request.selected.model,
        system_fingerprint=generation.fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=message,
                logprobs=chat_logprobs(codec, choice.logprobs, report) if wants_logprobs else None,
                finish_reason=finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if report.token_ids else UNSET,
            )
            for index, (choice, (message, finish_reason)) in enumerate(
                zip(choices, written, strict=True)
            )
        ],
        usage=usage,
        serving=generation.draft.receipt or UNSET,
    )
    if report.token_ids:
        answer.prompt_token_ids = list(generation.request.prompts[0])
    if report.prompt_logprobs:
        answer.prompt_logprobs = prompt_logprobs(codec, choices[0].prompt_logprobs)
    return answer


async def chat_events(generation: Generation, deltas: Deltas, codec: TextCodec) -> Events:
    options = generation.request
    writers: dict[int, ChatWriter] = {}
    count = UsageCount(generation.engine_requests)

    def chunk_event(choice: ChatChunkChoice, *, prompt: Sequence[int] | None = None) -> bytes:
        usage = count.usage() if options.continuous_usage else None
        chunk = _chat_chunk(generation, [choice], usage)
        if prompt is not None:
            chunk.prompt_token_ids = list(prompt)
        return event(chunk)

    async with aclosing(deltas):
        async for request_index, delta in deltas:
            written = b""
            writer = writers.get(delta.index)
            if writer is None:
                writer = writers[delta.index] = ChatWriter(options.reply)
                written = chunk_event(
                    ChatChunkChoice(index=delta.index, delta=writer.begin()),
                    prompt=options.prompts[0] if options.report.token_ids else None,
                )
            count.add(request_index, delta)
            choices = _chat_chunk_choices(delta, writer, codec, options.report)
            written += b"".join(map(chunk_event, choices))
            if written:
                yield written
    if options.include_usage:
        yield event(_chat_chunk(generation, [], count.usage()))
    if generation.draft.is_streamed:
        chunk = _chat_chunk(generation, [], None)
        chunk.serving = generation.draft.receipt or UNSET
        yield event(chunk)
    yield DONE


def _chat_chunk(
    generation: Generation, choices: list[ChatChunkChoice], usage: Usage | None
) -> ChatChunk:
    chunk = ChatChunk(
        id=generation.request.id,
        created=generation.created_s,
        model=generation.request.selected.model,
        system_fingerprint=generation.fingerprint,
        choices=choices,
    )
    if usage is not None:
        chunk.usage = usage
    return chunk


def _chat_chunk_choices(
    delta: Delta, writer: ChatWriter, codec: TextCodec, report: TokenReport
) -> list[ChatChunkChoice]:
    """Return the choices of the chunks of a delta, the last of which has what ends it."""
    written = writer.write(delta)
    is_last = delta.finish_reason is not None
    has_tokens = bool(delta.logprobs) or (report.token_ids and bool(delta.token_ids))
    if not written and not is_last and not has_tokens:
        return []
    # Clients take the end of calls from a delta of its own.
    if not written or (is_last and written[-1].tool_calls is not UNSET):
        written.append(ChatDelta())
    choices = [ChatChunkChoice(index=delta.index, delta=one) for one in written]
    if delta.logprobs is not None:
        choices[-1].logprobs = chat_logprobs(codec, delta.logprobs, report)
    if report.token_ids:
        choices[-1].token_ids = list(delta.token_ids)
    if delta.finish_reason is not None:
        choices[-1].finish_reason = writer.finish_reason(delta.finish_reason)
        choices[-1].stop_reason = delta.stop_reason
    return choices


COMPLETION = RouteKind(
    id_prefix="cmpl",
    prompt_param="prompt",
    default_max_tokens=16,
)


def completion_routes(context: Context) -> list[Route]:
    routes = Routes("OpenAI")

    @routes.post("/v1/completions", generating(CompletionRequest, Completion))
    async def create_completion(request: Call) -> Response:
        """Continues one or several prompts, complete or as a stream of chunks."""
        return await answer_completion(context, request)

    return routes.found


async def answer_completion(context: Context, request: Call) -> Response:
    with receipt_draft(context.receipts, context.base_identity, request) as draft:
        generation, writers = await _open_completion(context, request, draft)
    deltas = run(context, generation)
    if generation.request.stream:
        return await stream_events(request, _completion_events(generation, deltas, writers))
    choices, usage = await until_gone(request, collect(generation, deltas))
    return await off_loop(
        BYTES_PER_LOGPROB * num_reported(choices),
        lambda: json_response(_complete_completion(generation, choices, usage, writers)),
    )


async def _open_completion(
    context: Context, http: Call, draft: ReceiptDraft
) -> tuple[Generation, list[ChoiceWriter]]:
    body, raw = await read_own(context, http, CompletionRequest)
    reference = openai_reference(context, body, prompts=body.prompt)
    draft.asked = str(reference) or None
    prompts = split_prompts(body.prompt)
    holes = [FillPrompt(prompt, body.suffix) for prompt in prompts] if body.suffix else []
    if holes:
        check_hole(body)
    asked = Asked(
        kind=COMPLETION,
        body=body,
        prompts=holes or prompts,
        selected=reference,
        logprobs=completion_logprobs_of(body),
        truncation=truncation_of(body),
        add_special_tokens=body.add_special_tokens is not False,
        report=token_report(body),
    )
    generation = await open_own(context, http, draft, asked, raw)
    codec = generation.request.codec
    return generation, _writers(generation, prompts, codec, echo=bool(body.echo))


class Echo:
    """The prompt as all of its choices repeat it."""

    def __init__(self, text: str, first_token_id: int) -> None:
        self.text = text
        self._first_token_id = first_token_id
        self._written: CompletionLogprobs | None = None
        self._length = 0

    def begin(
        self, writer: CompletionLogprobsWriter, logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """Write the log probabilities of the prompt for the first choice; others copy them."""
        if self._written is None:
            self._written = writer.write(logprobs, first_prompt_token=self._first_token_id)
            self._length = writer.offset
        writer.offset = self._length
        written = self._written
        return CompletionLogprobs(
            text_offset=list(written.text_offset),
            token_logprobs=list(written.token_logprobs),
            tokens=list(written.tokens),
            top_logprobs=list(written.top_logprobs),
        )


class ChoiceWriter:
    """Writes one choice; with `echo`, its first part contains the prompt."""

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int],
        echo: Echo | None,
        *,
        wants_logprobs: bool,
        report: TokenReport = NO_REPORT,
    ) -> None:
        self._codec = codec
        self._prompt = prompt
        self._echo = echo
        self._wants_logprobs = wants_logprobs
        self._report = report
        self._logprobs = CompletionLogprobsWriter(codec, report)
        self._is_first = True

    def write(self, index: int, part: Choice | Delta) -> CompletionChoice:
        is_first, self._is_first = self._is_first, False
        echo = self._echo if is_first else None
        of_prompt, text = part.prompt_logprobs or (), part.text
        shown = None
        if self._wants_logprobs:
            shown = self._write_logprobs(part.logprobs or (), echo, of_prompt)
        choice = CompletionChoice(
            index=index, text=text if echo is None else echo.text + text, logprobs=shown
        )
        if self._report.token_ids:
            choice.token_ids = list(part.token_ids)
            choice.prompt_token_ids = list(self._prompt) if is_first else UNSET
        if self._report.prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs(self._codec, of_prompt)
        return choice

    def _write_logprobs(
        self,
        logprobs: Sequence[TokenLogprob],
        echo: Echo | None,
        of_prompt: Sequence[TokenLogprob],
    ) -> CompletionLogprobs:
        if echo is None:
            return self._logprobs.write(logprobs)
        written = echo.begin(self._logprobs, of_prompt)
        answer = self._logprobs.write(logprobs)
        for name in written.__struct_fields__:
            getattr(written, name).extend(getattr(answer, name))
        return written


def _writers(
    generation: Generation, prompts: Sequence[str | list[int]], codec: TextCodec, *, echo: bool
) -> list[ChoiceWriter]:
    writers = []
    params = generation.request.params
    for prompt, token_ids in zip(prompts, generation.request.prompts, strict=True):
        echoed = Echo(_text_of(prompt, codec, params), token_ids[0]) if echo else None
        wants_logprobs = params.logprobs is not None
        writers += [
            ChoiceWriter(
                codec,
                token_ids,
                echoed,
                wants_logprobs=wants_logprobs,
                report=generation.request.report,
            )
            for _ in range(params.n)
        ]
    return writers


def _text_of(prompt: str | list[int], codec: TextCodec, params: SamplingParams) -> str:
    if isinstance(prompt, str):
        return prompt
    return codec.decode(prompt, skip_special_tokens=params.skip_special_tokens)


def _complete_completion(
    generation: Generation, choices: list[Choice], usage: Usage, writers: list[ChoiceWriter]
) -> Completion:
    written = []
    for index, (choice, writer) in enumerate(zip(choices, writers, strict=True)):
        shown = writer.write(index, choice)
        shown.finish_reason, shown.stop_reason = choice.finish_reason, choice.stop_reason
        written.append(shown)
    whole = _completion(generation, written, usage)
    whole.serving = generation.draft.receipt or UNSET
    return whole


async def _completion_events(
    generation: Generation, deltas: Deltas, writers: list[ChoiceWriter]
) -> Events:
    count = UsageCount(generation.engine_requests)
    async with aclosing(deltas):
        async for request_index, delta in deltas:
            count.add(request_index, delta)
            index = generation.choice_index(request_index, delta)
            choice = _completion_chunk_choice(writers[index], index, delta)
            usage = count.usage() if generation.request.continuous_usage else None
            yield event(_completion(generation, [choice], usage))
    if generation.request.include_usage:
        yield event(_completion(generation, [], count.usage()))
    if generation.draft.is_streamed:
        last = _completion(generation, [], None)
        last.serving = generation.draft.receipt or UNSET
        yield event(last)
    yield DONE


def _completion_chunk_choice(writer: ChoiceWriter, index: int, delta: Delta) -> CompletionChoice:
    choice = writer.write(index, delta)
    if delta.finish_reason is not None:
        choice.finish_reason = delta.finish_reason.value
        choice.stop_reason = delta.stop_reason
    return choice


def _completion(
    generation: Generation, choices: list[CompletionChoice], usage: Usage | None
) -> Completion:
    completion = Completion(
        id=generation.request.id,
        created=generation.created_s,
        model=generation.request.selected.model,
        system_fingerprint=generation.fingerprint,
        choices=choices,
    )
    if usage is not None:
        completion.usage = usage
    return completion
