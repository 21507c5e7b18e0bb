"""A job's answer on its way to a reader who may be slow: new text joins what still waits."""

from __future__ import annotations

import asyncio

from loramux.backend import Delta
from loramux.engine.outputs import OutputCollector
from loramux.errors import LoramuxError
from loramux.types.request import TokenEvent


class JobStream:
    """put() never waits and never queues more than the answer itself; take() gives all there is."""

    def __init__(self, collector: OutputCollector, *, num_tokens: int = 0) -> None:
        self._collector = collector
        self.num_tokens = num_tokens
        """Prompt and longest answer: what the job may come to."""
        self._pending: dict[int, Delta] = {}
        self._error: LoramuxError | None = None
        self._news = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self._collector.request.request_id

    @property
    def is_finished(self) -> bool:
        """All has come, and all of it was taken."""
        return self._collector.is_finished and not self._pending

    def put(self, event: TokenEvent) -> Delta | None:
        """Returns the new delta, for the caller to see whether a stop string was hit."""
        delta = self._collector.apply(event)
        if delta is not None:
            waiting = self._pending.get(delta.index)
            self._pending[delta.index] = delta if waiting is None else _join(waiting, delta)
            self._news.set()
        return delta

    def fail(self, error: LoramuxError) -> None:
        self._error = error
        self._news.set()

    async def take(self) -> list[Delta]:
        """Waits for news; raises the error that ended the job, once all before it was taken."""
        await self._news.wait()
        self._news.clear()
        deltas, self._pending = list(self._pending.values()), {}
        if self._error is not None:
            if not deltas:
                raise self._error
            self._news.set()
        return deltas


def _join(first: Delta, second: Delta) -> Delta:
    logprobs = None
    if first.logprobs is not None:
        logprobs = first.logprobs + (second.logprobs or ())
    return Delta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        stop_hit=second.stop_hit,
        error=second.error,
        error_code=second.error_code,
        prompt_logprobs=first.prompt_logprobs,
        num_reused=first.num_reused,
        facts=first.facts or second.facts,
    )
