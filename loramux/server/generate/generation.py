"""Runs a GenerationRequest: its engine requests as one stream of deltas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec.structs import replace

from loramux.backend.text import Delta, TextBackend, TextCodec, failure_of
from loramux.errors import (
    AdapterRefused,
    EngineBusy,
    EngineStopped,
    InvalidRequest,
    LoramuxError,
    RateLimited,
)
from loramux.metrics.server import Metrics
from loramux.receipts.receipt import ServingStatus
from loramux.server.auth.quotas import Admission
from loramux.server.chat.tools.chat import ReplyFormat
from loramux.server.context import Context
from loramux.server.generate.prompts import check_token_ids, room_for_answer
from loramux.server.generate.receipt_draft import ReceiptDraft, UsageCount
from loramux.server.generate.sampling import MaxTokens, TokenReport, check_sizes
from loramux.server.http.call import Call
from loramux.server.naming.names import AdapterNames, Selected
from loramux.types.caller import Caller
from loramux.types.pooling import Pooling
from loramux.types.request import FinishReason, Request, Selection, TokenLogprob
from loramux.types.sampling import SamplingParams
from loramux.wire.text import Usage

T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, Delta], None]
"""Pairs of the index of an engine request and its delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteKind:
    """The differences between the generating routes."""

    id_prefix: str
    prompt_param: str
    """The field of the body that contains the prompt, for error messages."""
    default_max_tokens: int | None
    """None: as many as fit."""
    pools: bool = False
    """Whether the answer is a vector of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked request of any route, with its adapter resolved and its prompts tokenized."""

    id: str
    kind: RouteKind
    caller: Caller
    admission: Admission | None = None
    """The charge on the limits of the caller; None: it has none."""
    selected: Selected
    codec: TextCodec
    """The tokenizer of the selection."""
    vocab_size: int
    pooling: Pooling | None = None
    params: SamplingParams
    """Sampling parameters; the engine requests get their own max_tokens."""
    max_tokens: MaxTokens
    tokenizers: tuple[str, ...] = ()
    """Digest of the tokenizer files of each selected adapter when the codec was chosen."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids of each prompt."""
    cache_salt: str = ""
    timeout_s: float | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    report: TokenReport = TokenReport()
    reply: ReplyFormat = field(default_factory=ReplyFormat)
    """How a chat is answered."""


@runtime_checkable
class ComparesVocabulary(Protocol):
    """A codec that tells whether another has its vocabulary."""

    def shares_vocabulary(self, other: object) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A GenerationRequest that runs: its engine requests and its receipt."""

    request: GenerationRequest
    engine_requests: tuple[Request, ...]
    draft: ReceiptDraft
    fingerprint: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    def reservation(self) -> tuple[int, int]:
        """Return the tokens of the prompts, and the most that the answers may have."""
        requests = self.engine_requests
        # Requests for vectors have max_tokens 0.
        answers = (one.params.n * one.params.max_tokens for one in requests)
        return sum(len(one.prompt_token_ids) for one in requests), sum(answers)

    def choice_index(self, request_index: int, delta: Delta) -> int:
        return request_index * self.request.params.n + delta.index


def open_generation(
    context: Context, http: Call, request: GenerationRequest, draft: ReceiptDraft
) -> Generation:
    """Make the engine requests; raises InvalidRequest for a prompt that does not fit."""
    check_sizes(request.params, request.prompts)
    if request.params.grammar is not None:
        _check_vocabulary(request, context.backend.codec)
    engine_requests = tuple(
        Request(
            request_id=f"{request.id}-{number}",
            prompt_token_ids=token_ids,
            params=_params_for(context, request, token_ids),
            selection=request.selected.selection,
            tenant=request.caller.tenant,
            tenant_share=context.tenant_share(request.caller),
            adapter_share=context.adapter_share(request.selected),
            cache_salt=request.cache_salt,
            timeout_s=request.timeout_s,
            pooling=request.pooling,
        )
        for number, token_ids in enumerate(request.prompts)
    )
    draft.serve(engine_requests)
    if context.receipts.is_on:
        # Middleware writes it into the response's header, also if the generation fails.
        http.facts.receipt_id = draft.id
    selection = request.selected.selection
    tier_of = context.backend.residency.tier_of
    # Empty for the base, so that routers learn that the name means it.
    http.facts.tiers = [(cid, tier_of(cid)) for cid, _ in selection]
    return Generation(
        request=request,
        engine_requests=engine_requests,
        draft=draft,
        fingerprint=context.fingerprint,
    )


def _check_vocabulary(request: GenerationRequest, base: TextCodec) -> None:
    """Raise InvalidRequest if grammars, made of the base's tokens, do not fit the codec."""
    codec = request.codec
    if codec is base or (isinstance(codec, ComparesVocabulary) and codec.shares_vocabulary(base)):
        return
    raise InvalidRequest(
        f"{request.selected.model} has a vocabulary of its own, and grammars are made of the "
        "tokens of the base: leave out response_format, tools and the like.",
        param="model",
    )


def check_num_choices(context: Context, n: int, num_prompts: int) -> None:
    limit = context.options.max_choices
    if num_prompts * n > limit:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={n} make {num_prompts * n} answers; one "
            f"request may ask for {limit}. Send several requests.",
            param="prompt",
        )


def _params_for(
    context: Context, request: GenerationRequest, token_ids: Sequence[int]
) -> SamplingParams:
    card, kind = context.backend.card, request.kind
    max_tokens = room_for_answer(
        len(token_ids),
        request.max_tokens,
        max_model_len=card.max_model_len,
        default=kind.default_max_tokens,
        param=kind.prompt_param,
    )
    check_token_ids(token_ids, vocab_size=request.vocab_size, param=kind.prompt_param)
    if request.params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.params.min_tokens}, and the answer has at most {max_tokens} "
            "tokens.",
            param="min_tokens",
        )
    return replace(request.params, max_tokens=max_tokens)


@dataclass(slots=True)
class Choice:
    """Collects the deltas of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    stop_reason: str | int | None = None
    pooled: bytes = b""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason
        self.pooled = delta.pooled or self.pooled


def num_reported(choices: Sequence[Choice]) -> int:
    """How many log probabilities an answer lists: writing many of them takes long."""
    return sum(
        (1 + len(entries[0].top)) * len(entries)
        for choice in choices
        for entries in (choice.logprobs, choice.prompt_logprobs)
        if entries
    )


async def collect(generation: Generation, deltas: Deltas) -> tuple[list[Choice], Usage]:
    """Read all deltas into complete choices; raises if one of them fails."""
    choices = [Choice() for one in generation.engine_requests for _ in range(one.params.n)]
    count = UsageCount(generation.engine_requests)
    async with aclosing(deltas):
        async for index, delta in deltas:
            count.add(index, delta)
            choices[generation.choice_index(index, delta)].add(delta)
    return choices, count.usage()


async def run(context: Context, generation: Generation) -> Deltas:
    """Run all engine requests; closing the stream aborts them. The receipt is issued at the end."""
    draft, admission = generation.draft, generation.request.admission
    try:
        if admission is not None:
            admission.begin(*generation.reservation())
        streams = [_run_one(context, generation, one) for one in generation.engine_requests]
        async with aclosing(_run_all(streams)) as deltas:
            async for index, delta in deltas:
                draft.add_delta(index, delta)
                yield index, delta
        draft.end(ServingStatus.COMPLETED)
    except (EngineBusy, RateLimited) as error:
        draft.end(ServingStatus.REFUSED, error)
        raise
    except Exception as error:
        draft.end(ServingStatus.FAILED, error)
        raise
    finally:
        draft.end(ServingStatus.ABORTED)
        if admission is not None:
            admission.end(draft.num_tokens)


async def _run_all(streams: Sequence[AsyncGenerator[Delta, None]]) -> Deltas:
    if len(streams) > 1:
        async with aclosing(_merge(streams)) as merged:
            async for item in merged:
                yield item
        return
    async with aclosing(streams[0]) as deltas:
        async for delta in deltas:
            yield 0, delta


def submit(
    backend: TextBackend, names: AdapterNames, request: Request
) -> AsyncGenerator[Delta, None]:
    """Submit the request, and again if an adapter's files were missing and could be restored."""
    return resubmitting(lambda: backend.submit(request), names, request.selection)


async def resubmitting(
    submit: Callable[[], AsyncIterator[T]], names: AdapterNames, selection: Selection
) -> AsyncGenerator[T, None]:
    """Yield what a submitted request yields.

    It is submitted again if an adapter's files were missing and could be restored.
    """
    updates = submit()
    has_begun = False
    try:
        async for update in updates:
            has_begun = True
            yield update
        return
    except AdapterRefused:
        restored = [] if has_begun else [await names.restore(cid) for cid, _ in selection]
        if not any(restored):
            raise
    finally:
        await _close(updates)
    updates = submit()
    try:
        async for update in updates:
            yield update
    finally:
        await _close(updates)


async def _run_one(
    context: Context, generation: Generation, request: Request
) -> AsyncGenerator[Delta, None]:
    # Nothing is awaited between here and the backend, so the names cannot move any more.
    selected = context.names.rebind(generation.request.selected)
    if selected is not generation.request.selected:
        _check_same_tokenizers(context, generation.request, selected)
        request = replace(request, selection=selected.selection)
    tenant = generation.request.caller.confined_to
    monitor = _Monitor(context.metrics, request, selected, tenant)
    generation.draft.add_adapters(selected)
    deltas = submit(context.backend, context.names, request)
    try:
        async for delta in deltas:
            monitor.add(delta)
            yield delta
        monitor.check_complete()
    except LoramuxError:
        monitor.outcome = FinishReason.ERROR
        raise
    finally:
        await _close(deltas)
        monitor.end()


def _check_same_tokenizers(context: Context, request: GenerationRequest, now: Selected) -> None:
    """Raise AdapterRefused if the prompt was tokenized for another version of an adapter."""
    if context.names.tokenizers_of(now) != request.tokenizers:
        raise AdapterRefused(
            "changed_on_disk",
            f"The tokenizer of {now.model} was replaced while the prompt was tokenized.",
            fix="Send the request again.",
        )


class _Monitor:
    """Counts one engine request in the metrics, and raises unless every choice ends properly."""

    def __init__(
        self, metrics: Metrics, request: Request, selected: Selected, tenant: str | None
    ) -> None:
        """`tenant`: the tenant that the caller is bound to, if any."""
        self._metrics = metrics
        self._request = request
        # A request with several adapters counts in full for each of them.
        self._adapters = [
            counted
            for adapter in selected.used
            for counted in metrics.counted(adapter.cid, adapter.label, tenant)
        ]
        for adapter in self._adapters:
            adapter.add(requests=1)
        for one in selected.used:
            metrics.asked.add(one.cid, one.text)
        self._open = set(range(request.params.n))
        self._started_s = time.monotonic()
        self._last_s: dict[int, float] = {}
        self._num_tokens = 0
        self.outcome = FinishReason.ABORT

    def add(self, delta: Delta) -> None:
        now = time.monotonic()
        is_first = not self._last_s
        num_prompt_tokens = len(self._request.prompt_token_ids) if is_first else 0
        if is_first:
            self._metrics.first_token(now - self._started_s, num_prompt_tokens=num_prompt_tokens)
        elif delta.index in self._last_s:
            self._metrics.inter_token(now - self._last_s[delta.index])
        self._last_s[delta.index] = now
        self._metrics.generated(len(delta.token_ids))
        self._num_tokens += len(delta.token_ids)
        for adapter in self._adapters:
            adapter.add(prompt_tokens=num_prompt_tokens, generation_tokens=len(delta.token_ids))
        if delta.finish_reason is FinishReason.ERROR:
            raise failure_of(delta)
        if delta.finish_reason is FinishReason.ABORT:
            raise EngineStopped(delta.error or "The engine gave this request up before its end.")
        if delta.finish_reason is not None:
            self._open.discard(delta.index)
            self.outcome = delta.finish_reason if not self._open else self.outcome

    def check_complete(self) -> None:
        if self._open:
            raise EngineStopped("The engine's answer broke off before its end.")

    def end(self) -> None:
        self._metrics.ended(time.monotonic() - self._started_s, self.outcome)
        if self._num_tokens:
            self._metrics.answered(self._num_tokens / self._request.params.n)


async def _merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> Deltas:
    """Merge streams through a bounded queue; the first failure ends all of them."""
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[Delta, None],
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]],
) -> None:
    async with aclosing(stream):
        try:
            async for delta in stream:
                await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))


async def _close(updates: AsyncIterator[Any]) -> None:
    close = getattr(updates, "aclose", None)
    if close is not None:
        await close()
