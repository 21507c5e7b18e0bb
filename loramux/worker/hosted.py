"""Runs an engine in a process of its own, and starts a new one whenever it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, TypeVar

from loramux.backend.host import AdapterUse, EngineStats, Health
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    EngineDied,
    EngineStopped,
    LoramuxError,
)
from loramux.types.adapter import InspectedCard
from loramux.types.residency import ResidencyView
from loramux.worker.adapter_table import AdapterTable
from loramux.worker.messages import (
    AdapterT,
    Adopt,
    CardT,
    Examine,
    ListUses,
    Message,
    Pin,
    Prewarm,
    Register,
    RegisterMany,
    Registration,
    Remove,
    ResidencyUpdate,
    Shutdown,
    Verify,
    decode_error,
)
from loramux.worker.process import EngineKind, EngineProcess, OnProgress
from loramux.worker.spawn import SpawnedWorker
from loramux.worker.vital_signs import KillCause

_log = logging.getLogger(__name__)
_RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
# Adapters of one message to the engine: requests that arrive meanwhile are handled in between.
_BATCH = 64
_BATCH_PAUSE_S = 0.05
# Adapters that a deep health check tries until one serves.
_MAX_PROBED = 8

Item = TypeVar("Item")
StatsT = TypeVar("StatsT", bound=EngineStats)


class StatsView(Generic[StatsT]):
    """The newest statistics of an engine process, put together from its updates."""

    def __init__(self, newest: StatsT) -> None:
        self._newest = newest
        self.residency = ResidencyView()
        # None: to be put together by the next reader, as an update must not list all adapters.
        self._current: StatsT | None = self._newest

    @property
    def current(self) -> StatsT:
        if self._current is None:
            resident = tuple(self.residency.resident)
            self._current = replace(self._newest, resident_adapters=resident)
        return self._current

    def update(self, stats: StatsT | None, residency: ResidencyUpdate | None) -> None:
        if residency is not None:
            self.residency.apply(residency.tiers, is_full=residency.is_full)
            self._current = None
        if stats is not None:
            self._newest = stats
            self._current = None


class HostedEngine(ABC, Generic[CardT, AdapterT, StatsT]):
    """Implements loramux.backend.text.AdapterHost over an engine in another process.

    An engine adds its requests: it opens streams, and ends them all in `_fail_streams`.
    """

    kind: EngineKind
    no_stats: StatsT
    """The statistics before the first report."""

    def __init__(
        self, *, on_progress: OnProgress = lambda what, share: None, worker: SpawnedWorker | None
    ) -> None:
        """`worker`: a process that was spawned before, for the first engine."""
        self._worker = worker
        self._on_progress = on_progress
        self._process: EngineProcess[CardT, AdapterT] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._card: CardT | None = None
        self._table = AdapterTable[AdapterT]()
        self._state = Health.STARTING
        self._stats = StatsView(self.no_stats)
        self.num_restarts = 0
        self.kills: Counter[str] = Counter(dict.fromkeys(KillCause, 0))
        """Engine processes that the server killed, by KillCause."""

    # What an engine adds.

    @abstractmethod
    def _start_message(self, first: CardT | None) -> Message:
        """Return the message that starts a process; `first` is the card of the first one."""

    @abstractmethod
    def _described(self, card: CardT, first: CardT | None) -> CardT:
        """Return the card that is shown for that of a new process."""

    @property
    @abstractmethod
    def _open_requests(self) -> Sized: ...

    @abstractmethod
    def _fail_streams(self, error: EngineStopped) -> None:
        """End all open requests with an error."""

    @abstractmethod
    def _handle(self, reply: Message) -> None:
        """Handle a reply that is no answer to a call."""

    @abstractmethod
    async def _probe_selection(self, cid: str | None) -> None:
        """Generate as little as possible on the base, or with an adapter of weight 1."""

    # loramux.backend.text.AdapterHost

    @property
    def health(self) -> Health:
        return self._state

    @property
    def card(self) -> CardT:
        if self._card is None:
            raise EngineStopped("The engine has not started yet.")
        return self._card

    @property
    def stats(self) -> StatsT:
        return self._stats.current

    @property
    def residency(self) -> ResidencyView:
        return self._stats.residency

    @property
    def adapters(self) -> Mapping[str, AdapterT]:
        return self._table.cards

    @property
    def pinned(self) -> Set[str]:
        return self._table.pinned

    @property
    def engine_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        try:
            await self._open_process()
        except EngineDied as error:
            if error.kill_cause is not None:
                raise
            # It gave no reason: it may have been killed for its memory, or by mistake.
            _log.error("%s Starting it once more.", error)
            self.num_restarts += 1
            await self._open_process()
        self._supervisor = asyncio.create_task(self._supervise())
        await self._prepare()
        self._become(Health.READY)

    async def _prepare(self) -> None:
        """Prepare what the server needs beside the first process."""

    async def add_adapter(self, path: str) -> AdapterT:
        answer = await self._running.call(lambda call_id: Register(call_id=call_id, path=path))
        assert answer.adapter is not None
        self._table.add(answer.adapter)
        return answer.adapter

    async def inspect_adapters(
        self, paths: Sequence[str]
    ) -> list[AdapterT | InspectedCard | LoramuxError]:
        answers = await asyncio.gather(*map(self._inspect, _batches(paths)))
        return [found for batch in answers for found in batch]

    async def remove_adapter(self, cid: str) -> None:
        self._require_adapter(cid)
        if self._table.remove(cid):
            self._send(Remove(cid=cid))

    async def prewarm(self, cids: Sequence[str], *, num_busiest: int = 0) -> None:
        known = tuple(cid for cid in cids if cid in self.adapters)
        self._adopt(known)
        self._send(Prewarm(cids=known, num_busiest=num_busiest))

    async def pin_adapter(self, cid: str, pinned: bool) -> None:
        self._require_adapter(cid)
        self._adopt([cid])
        await self._running.call(lambda call_id: Pin(call_id=call_id, cid=cid, is_pinned=pinned))
        if not pinned:
            self._table.pinned.discard(cid)
        elif cid in self._table.cards:
            self._table.pinned.add(cid)

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        answer = await self._running.call(lambda call_id: ListUses(call_id=call_id))
        return answer.uses or []

    async def examine_adapter(self, path: str) -> Mapping[str, Any]:
        answer = await self._running.call(lambda call_id: Examine(call_id=call_id, path=path))
        return answer.report or {}

    async def probe(self, timeout_s: float) -> dict[str, float]:
        """Generate on the base, then read an adapter and generates with it.

        Returns the seconds of each check, or raises. Adapters that cannot be served, as their files
        changed or are gone, are counted; the check goes on with another one.
        """
        seconds = {}
        async with asyncio.timeout(timeout_s):
            began = time.monotonic()
            await self._probe_selection(None)
            seconds["generate_s"] = time.monotonic() - began
            hot = self._table.hottest(self.residency.resident)
            num_broken = 0
            for cid in islice(dict.fromkeys((*hot, *self.adapters)), _MAX_PROBED):
                began = time.monotonic()
                try:
                    await self._probe_adapter(cid)
                except (AdapterRefused, AdapterNotFound) as error:
                    # One that was removed meanwhile is not broken.
                    num_broken += cid in self.adapters
                    _log.warning("adapter %s cannot be served: %s", cid, error)
                else:
                    seconds["adapter_s"] = time.monotonic() - began
                    break
        return seconds | ({"broken_adapters": float(num_broken)} if num_broken else {})

    async def _probe_adapter(self, cid: str) -> None:
        self._adopt([cid])
        await self._running.call(lambda call_id: Verify(call_id=call_id, cid=cid))
        await self._probe_selection(cid)

    async def close(self, *, drain_s: float) -> None:
        if self._state is Health.STOPPED:
            return
        self._become(Health.DRAINING)
        deadline = time.monotonic() + drain_s
        while len(self._open_requests) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._become(Health.STOPPED)
        for task in (self._supervisor, self._restoring):
            if task is not None:
                task.cancel()
        self._fail_all(EngineStopped("The server is shutting down."))
        if self._process is not None:
            self._process.send(Shutdown())
            await self._process.wait(timeout_s=3.0)

    # Supervision.

    def _become(self, state: Health) -> None:
        self._state = state
        # Readers of residency reports also follow the state.
        self.residency.wake()

    def _become_quiet(self, is_quiet: bool) -> None:
        """Refuses new requests while the engine gives no sign of life; open ones go on."""
        if is_quiet and self._state is Health.READY:
            self._become(Health.STALLED)
        elif not is_quiet and self._state is Health.STALLED:
            self._become(Health.READY)

    def _count_kill(self, cause: str | None) -> None:
        if cause is not None:
            self.kills[cause] += 1

    async def _open_process(self) -> None:
        first = self._card
        worker, self._worker = self._worker, None
        try:
            self._process = await EngineProcess[CardT, AdapterT].open(
                self.kind, self._start_message(first), self._on_progress, worker
            )
        except EngineDied as error:
            self._count_kill(error.kill_cause)
            raise
        self._process.on_quiet = self._become_quiet
        self._card = self._described(self._process.card, first)
        ended, self._stats = self._stats, StatsView(self.no_stats)
        ended.residency.wake()
        self._table.begin_process()

    async def _supervise(self) -> None:
        """Handle replies of the engine; when it dies, fails open requests and starts another."""
        while True:
            process, cause = self._running, None
            try:
                while (reply := await process.receive()) is not None:
                    self._handle(reply)
            except Exception as error:  # The engine must be replaced, whatever the error is.
                _log.exception("a reply of engine %d cannot be handled", process.pid)
                cause = f"a reply of the engine cannot be handled: {error!r}"
            self._become(Health.RESTARTING)
            if self._restoring is not None:
                self._restoring.cancel()
            self._count_kill(KillCause.REPLY if cause else process.kill_cause)
            cause = cause or process.cause_of_death
            _log.error("engine %d is gone: %s; starting another", process.pid, cause)
            self._fail_all(EngineStopped(f"The answer is not complete: {cause}."))
            try:
                await process.kill(cause)
            except Exception:  # Without another engine, no request would ever be served again.
                _log.exception("engine %d cannot be ended", process.pid)
            await self._restart(self._table.hottest(self.residency.resident))

    async def _restart(self, hot: Sequence[str]) -> None:
        """Start engines until one is ready; `hot` are the adapters to load first."""
        attempt = 0
        while True:
            await asyncio.sleep(_RESTART_PAUSES_S[min(attempt, len(_RESTART_PAUSES_S) - 1)])
            attempt += 1
            try:
                await self._open_process()
            except Exception as error:  # Memory, processes or files may be available again later.
                is_expected = isinstance(error, LoramuxError | OSError)
                # One that was spawned and died is a restart, too.
                self.num_restarts += isinstance(error, EngineStopped)
                _log.error("the engine did not start again: %s", error, exc_info=not is_expected)
                continue
            self.num_restarts += 1
            self._become(Health.READY)
            _log.warning("engine %s is ready again", self.engine_pid)
            # It needs the replies that _supervise reads from now on.
            self._restoring = asyncio.create_task(self._restore(hot))
            return

    async def _restore(self, hot: Sequence[str]) -> None:
        """Pins adapters again, loads those that were in use, then adopts all others.

        Requests do not wait for it. An adapter that is removed meanwhile is left out.
        """
        for cid in list(self._table.pinned):
            try:
                await self.pin_adapter(cid, True)
            except EngineStopped:
                return
            except LoramuxError as error:
                # It may have been removed meanwhile.
                if cid in self.adapters:
                    _log.error("adapter %s cannot be pinned again: %s", cid, error)
        for cids in _batches(hot):
            await self.prewarm(cids)
            await asyncio.sleep(_BATCH_PAUSE_S)
        for cids in _batches(list(self.adapters)):
            self._adopt(cids)
            await asyncio.sleep(_BATCH_PAUSE_S)

    # For requests.

    def _require_ready(self) -> None:
        if self._state is not Health.READY:
            raise EngineStopped(f"The engine is {self._state.value}; try again in a few seconds.")

    def _require_adapter(self, cid: str) -> None:
        if cid not in self.adapters:
            raise AdapterNotFound(f"No adapter {cid} is registered.")

    def _use_adapters(self, cids: Sequence[str]) -> None:
        """Lets the engine learn the adapters of a request; raises AdapterNotFound."""
        for cid in cids:
            self._require_adapter(cid)
            self._table.mark_used(cid)
        self._adopt(cids)

    def _adopt(self, cids: Iterable[str]) -> None:
        """Lets the engine learn those of the adapters that it does not know yet."""
        for card in self._table.take_unknown(cids):
            self._send(Adopt(card=card))

    @property
    def _running(self) -> EngineProcess[CardT, AdapterT]:
        assert self._process is not None, "start() first"
        return self._process

    def _send(self, command: Message) -> None:
        self._running.send(command)

    def _fail_all(self, error: EngineStopped) -> None:
        self._fail_streams(error)
        if self._process is not None:
            self._process.fail_calls(error)

    async def _inspect(self, paths: Sequence[str]) -> list[AdapterT | InspectedCard | LoramuxError]:
        answer = await self._running.call(
            lambda call_id: RegisterMany(call_id=call_id, paths=tuple(paths), check="header")
        )
        found = [_result_of(registration) for registration in answer.registrations or ()]
        for registration in answer.registrations or ():
            if registration.adapter is not None:
                self._table.add(registration.adapter)
        return found


def _result_of(
    registration: Registration[AdapterT],
) -> AdapterT | InspectedCard | LoramuxError:
    if registration.error is not None:
        return decode_error(registration.error)
    card = registration.adapter or registration.inspected
    assert card is not None
    return card


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch
