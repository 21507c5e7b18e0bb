"""Passes a request to a replica and its answer back, byte by byte, with retries before the first.

A generation has no effect beside its answer, so that a try that has sent nothing to the client may
be repeated elsewhere. After the first byte there is no retry: a stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loramux.router.answers import Whole, error_answer, lost_event
from loramux.router.asked import Asked, passed_headers
from loramux.router.fleet import FORGET_S, SILENT_S, Fleet, Replica
from loramux.router.metrics import RouterMetrics
from loramux.router.upstream import Answer, Broken, ClosedIdle, Unreachable, Upstream

if TYPE_CHECKING:
    from starlette.types import Send

# Refusals after which another replica may have room.
_AGAIN = frozenset({429, 502, 503, 504})
# An answer up to this size is read whole before it goes on, so that it never ends halfway.
_WHOLE_BYTES = 2**20
_STREAM_TYPES = ("text/event-stream", "application/x-ndjson")


OnUse = Callable[[str, str], None]


class Cut(Exception):
    """The connection to the client must be cut: an answer of a known length cannot be completed."""


class _Watched:
    """Requests that wait for a replica, which are given up when it falls silent."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Timeout]] = {}
        self._streaming: dict[str, set[asyncio.Timeout]] = {}

    @contextmanager
    def waiting(self, replica: Replica, limit: asyncio.Timeout) -> Iterator[None]:
        with _member(self._waiting.setdefault(replica.name, set()), limit):
            yield

    @contextmanager
    def streaming(self, replica: Replica, limit: asyncio.Timeout) -> Iterator[None]:
        self._waiting[replica.name].discard(limit)
        with _member(self._streaming.setdefault(replica.name, set()), limit):
            yield

    def on_silence(self, replica: Replica, seconds: float) -> None:
        if seconds > SILENT_S:
            _expire(self._waiting.get(replica.name, ()))
        if seconds > FORGET_S:
            _expire(self._streaming.get(replica.name, ()))


@contextmanager
def _member(limits: set[asyncio.Timeout], limit: asyncio.Timeout) -> Iterator[None]:
    limits.add(limit)
    try:
        yield
    finally:
        limits.discard(limit)


def _expire(limits: set[asyncio.Timeout] | tuple[()]) -> None:
    now = asyncio.get_running_loop().time()
    for limit in list(limits):
        if not limit.expired():
            limit.reschedule(now)


class Relay:
    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        metrics: RouterMetrics,
        *,
        on_use: OnUse = lambda name, cids: None,
    ) -> None:
        """`on_use`: called with the name and the CIDs of each answer that tells them."""
        self._fleet = fleet
        self._on_use = on_use
        self._upstream = upstream
        self._metrics = metrics
        self._watched = _Watched()
        self.on_silence = self._watched.on_silence

    async def pass_on(self, asked: Asked, send: Send) -> None:
        """Answers a request from the best replica that takes it."""
        refusals: list[Whole] = []
        without: set[str] = set()
        began = time.perf_counter()
        ranked = self._fleet.ranked(
            asked.name, prompt_tokens=asked.prompt_tokens, now=time.monotonic()
        )
        for attempt, replica in enumerate(ranked):
            if attempt == 0:
                self._metrics.chosen(time.perf_counter() - began)
            if replica.base_digest in without:
                continue
            if attempt:
                self._metrics.retried()
            refusal = await self._attempt(asked, replica, send, attempt=attempt)
            if refusal is None:
                return
            refusals.append(refusal)
            if refusal.status == 404 and replica.revision >= self._fleet.revision:
                # All replicas of this base would say the same.
                without.add(replica.base_digest)
            if not self._may_repeat(asked, refusal):
                break
        await _worst(refusals).send(send)

    async def ask(
        self, asked: Asked, replica: Replica, *, body: bytes | None = None, method: str = ""
    ) -> Whole:
        """Asks one replica and returns its whole answer; one that cannot be reached is a 502."""
        with self._opened(replica, ""):
            try:
                async with (
                    asyncio.timeout(None) as limit,
                    self._upstream.ask(
                        method or asked.method,
                        replica.url + asked.target,
                        headers=asked.headers,
                        body=asked.body if body is None else body,
                    ) as answer,
                ):
                    with self._watched.waiting(replica, limit):
                        return Whole(
                            answer.status, passed_headers(answer.headers), await answer.whole()
                        )
            except (Unreachable, Broken, TimeoutError) as error:
                self._fleet.failed(replica, time.monotonic())
                return error_answer(502, f"{replica.name} did not answer: {error}")

    async def _attempt(
        self, asked: Asked, replica: Replica, send: Send, *, attempt: int
    ) -> Whole | None:
        """Returns the refusal of a replica after which another may be asked, else None."""
        for is_second in (False, True):
            begun = _Begun()
            with self._opened(replica, asked.name):
                try:
                    return await self._once(asked, replica, send, begun, attempt=attempt)
                except ClosedIdle as error:
                    # Not a failure of the replica, unless it happens twice.
                    if is_second or not asked.is_repeatable:
                        return self._unreachable(replica, error, is_repeatable=asked.is_repeatable)
                except (Unreachable, Broken, TimeoutError) as error:
                    refusal = self._unreachable(replica, error, is_repeatable=asked.is_repeatable)
                    if not begun.is_sent:
                        return refusal
                    self._metrics.lost(replica)
                    await begun.end(asked, send)
                    return None
        raise AssertionError("a second try returns")

    async def _once(
        self, asked: Asked, replica: Replica, send: Send, begun: _Begun, *, attempt: int
    ) -> Whole | None:
        headers = [*asked.headers, ("x-loramux-attempt", str(attempt + 1))]
        async with asyncio.timeout(None) as limit:
            with self._watched.waiting(replica, limit):
                async with self._upstream.ask(
                    asked.method, replica.url + asked.target, headers=headers, body=asked.body
                ) as answer:
                    kept = passed_headers(answer.headers)
                    kept.append((b"x-loramux-replica", replica.name.encode()))
                    if self._is_refusal(answer, replica):
                        return Whole(answer.status, kept, await answer.whole())
                    self._learn(asked, answer, replica)
                    if not _is_stream(answer):
                        whole = Whole(answer.status, kept, await answer.whole())
                        # From here on it cannot fail halfway.
                        begun.is_sent = True
                        await whole.send(send)
                        return None
                    with self._watched.streaming(replica, limit):
                        await _stream(answer, kept, begun, send)
        return None

    def _is_refusal(self, answer: Answer, replica: Replica) -> bool:
        """Whether another replica may answer otherwise."""
        if answer.status != 404:
            return answer.status in _AGAIN
        bases = {other.base_digest for other in self._fleet.usable(time.monotonic())}
        return replica.revision < self._fleet.revision or len(bases) > 1

    def _may_repeat(self, asked: Asked, refusal: Whole) -> bool:
        return asked.is_repeatable or refusal.status != 502

    def _learn(self, asked: Asked, answer: Answer, replica: Replica) -> None:
        if asked.name and answer.status == 200 and asked.is_repeatable:
            for cids in answer.values(b"x-loramux-cid"):
                self._fleet.learn(asked.name, cids, base_digest=replica.base_digest)
                self._on_use(asked.name, cids)
            self._metrics.answered(replica, answer.header(b"x-loramux-tier") or "base")

    def _unreachable(self, replica: Replica, error: Exception, *, is_repeatable: bool) -> Whole:
        self._fleet.failed(replica, time.monotonic())
        self._metrics.failed(replica)
        # 502: it may have had an effect, and is not repeated.
        status = 502 if not is_repeatable and getattr(error, "was_sent", True) else 503
        return error_answer(status, f"{replica.name} gave no answer: {error or 'it is silent'}.")

    @contextmanager
    def _opened(self, replica: Replica, name: str) -> Iterator[None]:
        self._fleet.sent(replica, name, time.monotonic())
        try:
            yield
        finally:
            self._fleet.ended(replica)


class _Begun:
    """How much of an answer has gone to the client."""

    def __init__(self) -> None:
        self.is_sent = False
        self.content_type = ""
        self.last = b""

    async def end(self, asked: Asked, send: Send) -> None:
        """Ends an answer that was lost so that it cannot be taken for complete."""
        if not self.content_type.startswith(_STREAM_TYPES):
            raise Cut
        gap = b"" if self.last.endswith(b"\n") or not self.last else b"\n\n"
        event = gap + lost_event(asked.path, self.content_type)
        await send({"type": "http.response.body", "body": event})


async def _stream(
    answer: Answer, headers: list[tuple[bytes, bytes]], begun: _Begun, send: Send
) -> None:
    chunks = answer.chunks()
    begun.last = await anext(chunks, b"")
    begun.is_sent, begun.content_type = True, answer.header(b"content-type")
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": begun.last, "more_body": True})
    async for chunk in chunks:
        begun.last = chunk
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _is_stream(answer: Answer) -> bool:
    """Whether an answer goes on as it comes: streams, and large ones."""
    if answer.header(b"content-type").startswith(_STREAM_TYPES):
        return True
    declared = answer.header(b"content-length")
    return not declared.isdigit() or int(declared) > _WHOLE_BYTES


def _worst(refusals: list[Whole]) -> Whole:
    """Returns what to say when every replica has refused."""
    if not refusals:
        return error_answer(503, "No replica can take this request now.")
    if all(refusal.status == 429 for refusal in refusals):
        return min(refusals, key=lambda refusal: refusal.retry_after_s).with_retry_after()
    told = [one for one in refusals if one.status == 404] or refusals
    return told[-1].with_retry_after()
