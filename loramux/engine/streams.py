"""Buffers the deltas of a request for a reader that may be slow."""

from __future__ import annotations

import asyncio

from loramux.backend import Delta
from loramux.engine.outputs import OutputCollector
from loramux.errors import LoramuxError
from loramux.types.request import Request, TokenEvent


class RequestStream:
    """Merges new deltas into those not read yet, so that it never holds more than the answer."""

    def __init__(self, collector: OutputCollector) -> None:
        self._collector = collector
        self._pending: dict[int, Delta] = {}
        self._error: LoramuxError | None = None
        self._has_news = asyncio.Event()

    @property
    def request(self) -> Request:
        return self._collector.request

    @property
    def is_finished(self) -> bool:
        """True once every choice has ended and all deltas were taken."""
        return self._collector.is_finished and not self._pending

    def put(self, event: TokenEvent) -> Delta | None:
        """Returns the new delta; the caller checks it for a stop string."""
        delta = self._collector.apply(event)
        if delta is not None:
            waiting = self._pending.get(delta.index)
            self._pending[delta.index] = delta if waiting is None else _join(waiting, delta)
            self._has_news.set()
        return delta

    def fail(self, error: LoramuxError) -> None:
        self._error = error
        self._has_news.set()

    async def take(self) -> list[Delta]:
        """Waits for deltas; raises the request's error once all deltas before it were taken."""
        await self._has_news.wait()
        self._has_news.clear()
        deltas, self._pending = list(self._pending.values()), {}
        if self._error is not None:
            if not deltas:
                raise self._error
            self._has_news.set()
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
