"""Passes a request to a replica and its answer back, byte by byte, with retries before the first.

A generation has no effect beside its answer, so that a try that has sent nothing to the client may
be repeated elsewhere, within a budget (`repeats.py`). After the first byte there is no retry: a
stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loramux.router.answers import Whole, error_answer, lost_event
from loramux.router.asked import Asked, passed_headers
from loramux.router.expect import Expectation
from loramux.router.fleet import FORGET_S, SILENT_S, Fleet, Replica
from loramux.router.metrics import RouterMetrics
from loramux.router.repeats import MAX_TRIES, RetryBudget, is_inference
from loramux.router.upstream import Answer, Broken, ClosedIdle, Unreachable, Upstream
from loramux.types.expected import EXPECT_HEADER

if TYPE_CHECKING:
    from starlette.types import Send

Expect = Callable[[Asked], Awaitable[Expectation]]
_log = logging.getLogger(__name__)
CONTROL_S = 60.0
"""How long a request of the router itself, or one to all replicas, may take."""
# Refusals after which another replica may have room.
_AGAIN = frozenset({429, 502, 503, 504})
# An answer up to this size is read whole before it goes on, so that it never ends halfway.
_WHOLE_BYTES = 2**20
_STREAM_TYPES = ("text/event-stream", "application/x-ndjson")


# Of requests that no server answers.
_ORDERLY = frozenset({501, 505})
_FAULT_STATUS = 500

OnUse = Callable[[str, str], None]


class Cut(Exception):
    """The connection to the client must be cut: an answer of a known length cannot be completed."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An answer of one replica after which another may be asked."""

    answer: Whole
    may_repeat: bool
    is_free: bool = False
    """The replica was not reached: no work was asked of the fleet."""
    is_idle: bool = False
    """It closed a connection that had been idle, and may be asked again."""
    is_renewed: bool = False
    """It refused what the router expected, and now the router expects something else."""


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
        expect: Expect | None = None,
    ) -> None:
        """`on_use`: called with the name and the CIDs of each answer that tells them.

        `expect`: says what may answer a request; None: anything.
        """
        self._fleet = fleet
        self._on_use = on_use
        self._upstream = upstream
        self._metrics = metrics
        self._expect = expect
        self._budget = RetryBudget()
        self._watched = _Watched()
        self.on_silence = self._watched.on_silence

    async def pass_on(self, asked: Asked, send: Send) -> None:
        """Answers a request from the best replica that takes it."""
        expected = await self._expectation(asked)
        refusals: list[_Refusal] = []
        without: set[str] = set()
        self._budget.request()
        began = time.perf_counter()
        ranked = self._fleet.ranked(
            asked.name, prompt_tokens=asked.prompt_tokens, now=time.monotonic()
        )
        for replica in ranked:
            if not refusals:
                self._metrics.chosen(time.perf_counter() - began)
            elif replica.base_digest in without:
                continue
            elif not self._may_try_again(refusals):
                break
            if await self._ask_replica(asked, replica, send, refusals, expected):
                return
            is_unknown = refusals[-1].answer.status == 404 and not expected.is_wanted
            if is_unknown and replica.revision >= self._fleet.revision:
                # All replicas of this base would say the same.
                without.add(replica.base_digest)
        worst = _worst([refusal.answer for refusal in refusals])
        is_absent = worst.status == 404 and expected.is_wanted
        if is_absent or expected.is_other_content(worst.status):
            worst = error_answer(503, "The adapter is being loaded again on the servers.")
        await worst.send(send)

    async def _expectation(self, asked: Asked) -> Expectation:
        if self._expect is None or asked.method != "POST" or not asked.is_repeatable:
            return Expectation()
        return await self._expect(asked)

    async def _ask_replica(
        self,
        asked: Asked,
        replica: Replica,
        send: Send,
        refusals: list[_Refusal],
        expected: Expectation,
    ) -> bool:
        """Return whether the request was answered; else the refusal is added."""
        for is_second in (False, True):
            told = replace(asked, headers=[*asked.headers, (EXPECT_HEADER, expected.header)])
            refusal = await self._attempt(
                told if expected.allowed else asked, replica, send, expected, attempt=len(refusals)
            )
            if refusal is None:
                return True
            status = refusal.answer.status
            if expected.may_change(status):
                is_renewed = await expected.renew(replica, status)
                refusal = replace(refusal, is_free=True, is_renewed=is_renewed)
            refusals.append(refusal)
            if is_second and refusal.is_idle:
                now = time.monotonic()
                self._fleet.failed(replica, now)
                self._fleet.judge(replica, is_fault=True, now=now)
            is_again = refusal.is_idle or refusal.is_renewed
            if is_second or not is_again or not self._may_try_again(refusals):
                break
        return False

    def _may_try_again(self, refusals: list[_Refusal]) -> bool:
        last = refusals[-1]
        if not last.may_repeat or len(refusals) >= MAX_TRIES:
            return False
        if not last.is_free and not self._budget.take():
            self._metrics.unbudgeted()
            return False
        self._metrics.retried()
        return True

    async def ask(
        self,
        asked: Asked,
        replica: Replica,
        *,
        body: bytes | None = None,
        method: str = "",
        limit_s: float = CONTROL_S,
    ) -> Whole:
        """Asks one replica and returns its whole answer; 502: not reached, 504: no answer."""
        with self._opened(replica, ""):
            try:
                async with (
                    asyncio.timeout(limit_s) as limit,
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
            except (Unreachable, Broken) as error:
                self._fleet.failed(replica, time.monotonic())
                _log.info("%s did not answer %s: %s", replica.name, asked.path, error)
                return error_answer(502, f"The server {replica.id} did not answer.")
            except TimeoutError:
                _log.warning("%s did not answer %s in time", replica.name, asked.path)
                return error_answer(504, f"The server {replica.id} did not answer in time.")

    async def _attempt(
        self, asked: Asked, replica: Replica, send: Send, expected: Expectation, *, attempt: int
    ) -> _Refusal | None:
        """Return the refusal of a replica after which another may be asked, else None."""
        begun = _Begun()
        with self._opened(replica, asked.name):
            try:
                return await self._once(asked, replica, send, begun, expected, attempt=attempt)
            except ClosedIdle as error:
                # The connection may have been idle for too long: not a fault of the replica.
                return self._unreachable(asked, replica, error, is_fault=False)
            except (Unreachable, Broken, TimeoutError) as error:
                refusal = self._unreachable(asked, replica, error, is_fault=True)
                if not begun.is_sent:
                    return refusal
                self._metrics.lost(replica)
                await begun.end(asked, send)
                return None

    async def _once(
        self,
        asked: Asked,
        replica: Replica,
        send: Send,
        begun: _Begun,
        expected: Expectation,
        *,
        attempt: int,
    ) -> _Refusal | None:
        headers = [*asked.headers, ("x-loramux-attempt", str(attempt + 1))]
        sent = _Sent(replica, asked, self._fleet.keys_of(asked.name))
        async with asyncio.timeout(None) as limit:
            with self._watched.waiting(replica, limit):
                async with self._upstream.ask(
                    asked.method, replica.url + asked.target, headers=headers, body=asked.body
                ) as answer:
                    kept = passed_headers(answer.headers)
                    kept.append((b"x-loramux-replica", replica.id.encode()))
                    self._judge(answer, replica)
                    if self._is_refusal(answer.status, replica, expected):
                        whole = Whole(answer.status, kept, await answer.whole())
                        return _Refusal(whole, may_repeat=asked.is_repeatable)
                    self._learn(asked, answer, replica)
                    if not _is_stream(answer):
                        whole = Whole(answer.status, kept, await answer.whole())
                        if answer.status == 200:
                            sent.measure(is_stream=False)
                        # From here on it cannot fail halfway.
                        begun.is_sent = True
                        await whole.send(send)
                        return None
                    with self._watched.streaming(replica, limit):
                        await _stream(answer, kept, begun, send, on_first=sent)
        return None

    def _judge(self, answer: Answer, replica: Replica) -> None:
        is_refused = answer.status == 503 and bool(answer.header(b"retry-after"))
        is_fault = answer.status >= _FAULT_STATUS and answer.status not in _ORDERLY
        self._fleet.judge(replica, is_fault=is_fault and not is_refused, now=time.monotonic())

    def _is_refusal(self, status: int, replica: Replica, expected: Expectation) -> bool:
        """Whether another replica may answer otherwise."""
        if expected.may_change(status):
            return True
        if status != 404:
            return status in _AGAIN
        bases = {other.base_digest for other in self._fleet.usable(time.monotonic())}
        is_behind = replica.revision < self._fleet.revision
        return is_behind or len(bases) > 1 or expected.is_wanted

    def _learn(self, asked: Asked, answer: Answer, replica: Replica) -> None:
        if asked.name and answer.status == 200 and asked.is_repeatable:
            for cids in answer.values(b"x-loramux-cid"):
                self._fleet.learn(asked.name, cids, base_digest=replica.base_digest)
                self._on_use(asked.name, cids)
            self._metrics.answered(replica, answer.header(b"x-loramux-tier") or "base")

    def _unreachable(
        self, asked: Asked, replica: Replica, error: Exception, *, is_fault: bool
    ) -> _Refusal:
        was_sent = getattr(error, "was_sent", True)
        if is_fault:
            now = time.monotonic()
            self._fleet.failed(replica, now)
            self._fleet.judge(replica, is_fault=True, now=now)
            self._metrics.failed(replica)
            _log.info("%s gave no answer: %s", replica.name, error or "it is silent")
        may_repeat = asked.is_repeatable or not was_sent
        # 502: it may have had an effect, and is not repeated.
        status = 503 if may_repeat else 502
        answer = error_answer(status, f"The server {replica.id} gave no answer.")
        is_free = not was_sent or not is_fault
        return _Refusal(answer, may_repeat, is_free=is_free, is_idle=not is_fault)

    @contextmanager
    def _opened(self, replica: Replica, name: str) -> Iterator[None]:
        self._fleet.sent(replica, name, time.monotonic())
        try:
            yield
        finally:
            self._fleet.ended(replica)


class _Sent:
    """A request on its way, whose first byte is compared with what the reports promise."""

    def __init__(self, replica: Replica, asked: Asked, keys: Sequence[str]) -> None:
        self._replica = replica
        self._is_inference = is_inference(asked.method, asked.path)
        self._at = time.monotonic()
        self._claimed_s = replica.claimed_seconds(keys, asked.prompt_tokens, self._at)
        self._whole_s = replica.answer_tokens * replica.step_s

    def measure(self, *, is_stream: bool) -> None:
        """Record the first byte; a whole answer has come with all of its tokens."""
        if self._is_inference:
            now = time.monotonic()
            claimed_s = self._claimed_s + (0.0 if is_stream else self._whole_s)
            self._replica.conduct.sample(now - self._at, claimed_s=claimed_s, now=now)


class _Begun:
    """How much of an answer has gone to the client."""

    def __init__(self) -> None:
        self.is_sent = False
        self.content_type = ""
        self.last = b""

    async def end(self, asked: Asked, send: Send) -> None:
        """End an answer that was lost so that it cannot be taken for complete."""
        if not self.content_type.startswith(_STREAM_TYPES):
            raise Cut
        gap = b"" if self.last.endswith(b"\n") or not self.last else b"\n\n"
        event = gap + lost_event(asked.path, self.content_type)
        await send({"type": "http.response.body", "body": event})


async def _stream(
    answer: Answer,
    headers: list[tuple[bytes, bytes]],
    begun: _Begun,
    send: Send,
    *,
    on_first: _Sent,
) -> None:
    chunks = answer.chunks()
    begun.last = await anext(chunks, b"")
    if answer.status == 200:
        on_first.measure(is_stream=True)
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
    """Return what to say when every replica has refused."""
    if not refusals:
        return error_answer(503, "No replica can take this request now.")
    if all(refusal.status == 429 for refusal in refusals):
        return min(refusals, key=lambda refusal: refusal.retry_after_s).with_retry_after()
    told = [one for one in refusals if one.status == 404] or refusals
    return told[-1].with_retry_after()
