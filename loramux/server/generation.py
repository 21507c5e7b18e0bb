"""The jobs of one HTTP request, run as one stream of deltas; closing it aborts what still runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from loramux.backend import Delta, TextBackend, failure_of
from loramux.errors import AdapterRefused, EngineBusy, EngineStopped, LoramuxError
from loramux.metrics.server import Metrics
from loramux.receipts.receipt import ServingStatus
from loramux.server.names import AdapterNames, Selected
from loramux.server.serving import ServingRecord
from loramux.server.usage import UsageCount
from loramux.server.wire import Usage
from loramux.types.request import FinishReason, Request, TokenLogprob

Deltas = AsyncGenerator[tuple[int, Delta], None]
"""(which job, delta)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What stays the same through all of an answer."""

    answer_id: str
    created_s: int
    selected: Selected
    fingerprint: str
    jobs: tuple[Request, ...]
    record: ServingRecord
    include_usage: bool = False
    continuous_usage: bool = False

    def choice_index(self, job_index: int, delta: Delta) -> int:
        return job_index * self.jobs[0].params.n + delta.index


@dataclass(slots=True)
class Choice:
    """One choice, as far as its deltas have come."""

    job: Request
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason


async def collect(answer: Answer, deltas: Deltas) -> tuple[list[Choice], Usage]:
    """All choices, whole; raises rather than return a part."""
    choices = [Choice(job) for job in answer.jobs for _ in range(job.params.n)]
    count = UsageCount(answer.jobs)
    async with aclosing(deltas):
        async for job_index, delta in deltas:
            count.add(job_index, delta)
            choices[answer.choice_index(job_index, delta)].add(delta)
    return choices, count.usage()


async def run_jobs(
    backend: TextBackend, metrics: Metrics, names: AdapterNames, answer: Answer
) -> Deltas:
    """However it ends, the answer's record hears of it."""
    record = answer.record
    try:
        streams = [_run_job(backend, metrics, names, answer, job) for job in answer.jobs]
        async with aclosing(_run_all(streams)) as deltas:
            async for job_index, delta in deltas:
                record.saw(job_index, delta)
                yield job_index, delta
        record.end(ServingStatus.COMPLETED)
    except EngineBusy as error:
        record.end(ServingStatus.REFUSED, error)
        raise
    except Exception as error:
        record.end(ServingStatus.FAILED, error)
        raise
    finally:
        record.end(ServingStatus.ABORTED)


async def _run_all(streams: Sequence[AsyncGenerator[Delta, None]]) -> Deltas:
    if len(streams) > 1:
        async with aclosing(_merge(streams)) as merged:
            async for item in merged:
                yield item
        return
    async with aclosing(streams[0]) as deltas:
        async for delta in deltas:
            yield 0, delta


async def submit(
    backend: TextBackend, names: AdapterNames, job: Request
) -> AsyncGenerator[Delta, None]:
    """Submits the request, and again if the adapter's files were missing and could be restored."""
    deltas = backend.submit(job)
    has_begun = False
    try:
        async for delta in deltas:
            has_begun = True
            yield delta
        return
    except AdapterRefused:
        if has_begun or not job.selection or not await names.restore(job.selection[0][0]):
            raise
    finally:
        await _close(deltas)
    deltas = backend.submit(job)
    try:
        async for delta in deltas:
            yield delta
    finally:
        await _close(deltas)


async def _run_job(
    backend: TextBackend, metrics: Metrics, names: AdapterNames, answer: Answer, job: Request
) -> AsyncGenerator[Delta, None]:
    # Nothing is awaited between here and the backend, so the name cannot move any more.
    job = names.rebind(job, answer.selected.name)
    watch = _Watch(metrics, job, answer.selected.label)
    for cid, _ in job.selection:
        answer.record.begin(cid)
    deltas = submit(backend, names, job)
    try:
        async for delta in deltas:
            watch.saw(delta)
            yield delta
        watch.check_complete()
    except LoramuxError:
        watch.outcome = FinishReason.ERROR
        raise
    finally:
        await _close(deltas)
        watch.ended()


class _Watch:
    """Counts one job, and holds it to the contract: every choice ends, none of them in an error."""

    def __init__(self, metrics: Metrics, job: Request, label: str | None) -> None:
        self._metrics = metrics
        self._job = job
        self._adapters = [
            counted for cid, _ in job.selection for counted in metrics.counted(cid, label or cid)
        ]
        for adapter in self._adapters:
            adapter.add(requests=1)
        self._open = set(range(job.params.n))
        self._started_s = time.monotonic()
        self._last_s: dict[int, float] = {}
        self.outcome = FinishReason.ABORT

    def saw(self, delta: Delta) -> None:
        now = time.monotonic()
        is_first = not self._last_s
        num_prompt_tokens = len(self._job.prompt_token_ids) if is_first else 0
        if is_first:
            self._metrics.first_token(now - self._started_s, num_prompt_tokens=num_prompt_tokens)
        elif delta.index in self._last_s:
            self._metrics.inter_token(now - self._last_s[delta.index])
        self._last_s[delta.index] = now
        self._metrics.generated(len(delta.token_ids))
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

    def ended(self) -> None:
        self._metrics.ended(time.monotonic() - self._started_s, self.outcome)


async def _merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> Deltas:
    """Items as they come, a bounded number ahead of the reader; the first failure ends all."""
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


async def _close(deltas: AsyncIterator[Delta]) -> None:
    close = getattr(deltas, "aclose", None)
    if close is not None:
        await close()
