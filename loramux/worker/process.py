"""Starts the engine process, watches its pulse, and matches calls with their answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, Self, cast

from loramux.errors import EngineDied, LoramuxError
from loramux.worker.channel import ServerChannel
from loramux.worker.messages import (
    AdapterT,
    Answer,
    CardT,
    Failed,
    Message,
    Progress,
    Ready,
    decode_error,
)
from loramux.worker.process_view import ProcessView
from loramux.worker.spawn import SpawnedWorker, spawn_worker
from loramux.worker.vital_signs import QUIET_S, KillCause, VitalSigns

_log = logging.getLogger(__name__)
_WATCH_S = 0.5
_POLL_S = 0.01
# A process closes its socket a moment before its exit status is known.
_EXIT_S = 1.0

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What the supervisor knows of a kind of engine process."""

    module: str
    """What the process runs."""
    replies: Any
    """The union of the messages that it sends."""
    step_limit_s: float
    """A step that takes this long, although nothing keeps it from running, is a deadlock."""


class PendingCalls(Generic[AdapterT]):
    """Futures of the commands that the engine answers individually, by call id."""

    def __init__(self) -> None:
        self._ids = count()
        self._futures: dict[int, asyncio.Future[Answer[AdapterT]]] = {}
        self._error: LoramuxError | None = None

    def open(self) -> tuple[int, asyncio.Future[Answer[AdapterT]]]:
        """Return a new call id and its future; raise the error of fail() once it was called."""
        if self._error is not None:
            raise self._error
        call_id = next(self._ids)
        future = self._futures[call_id] = asyncio.get_running_loop().create_future()
        return call_id, future

    def answer(self, answer: Answer[AdapterT]) -> None:
        future = self._futures.pop(answer.call_id, None)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(decode_error(answer.error))
        else:
            future.set_result(answer)

    def fail(self, error: LoramuxError) -> None:
        """Fails all pending and future calls: the engine is dead."""
        self._error = error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()


class EngineProcess(Generic[CardT, AdapterT]):
    """One engine process: open() returns when it is ready, receive() gives None when it is dead."""

    def __init__(self, worker: SpawnedWorker, channel: ServerChannel, step_limit_s: float) -> None:
        self._popen = worker.popen
        self._pulse = worker.pulse
        self._channel = channel
        self._vitals = VitalSigns(step_limit_s, ProcessView(worker.popen.pid).look)
        self._phase = "starting"
        self._watcher = asyncio.create_task(self._watch())
        self._calls = PendingCalls[AdapterT]()
        self._card: CardT | None = None
        self._death: str | None = None
        self.kill_cause: KillCause | None = None
        """Why the watch killed it; None: it did not."""
        self.on_quiet: Callable[[bool], None] = lambda is_quiet: None
        """Called when the ready process gives no sign of life, and when it does again."""

    @classmethod
    async def open(
        cls,
        kind: EngineKind,
        start: Message,
        on_progress: OnProgress,
        worker: SpawnedWorker | None = None,
    ) -> Self:
        """Return when the engine is ready; raise the error that prevents its start.

        `worker`: a process that was spawned before; None spawns one.
        """
        worker = worker or spawn_worker(kind.module)
        try:
            channel = await ServerChannel.open(worker.connection, kind.replies)
        except BaseException:
            worker.close()
            raise
        process = cls(worker, channel, kind.step_limit_s)
        process.send(start)
        try:
            await process._wait_until_ready(on_progress)
        except BaseException:
            await process.kill("it did not start")
            raise
        return process

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def cause_of_death(self) -> str:
        return self._death or "the engine process ended"

    @property
    def card(self) -> CardT:
        assert self._card is not None, "the process is not ready"
        return self._card

    def send(self, command: Message) -> None:
        self._channel.send(command)

    async def call(self, make: Callable[[int], Message]) -> Answer[AdapterT]:
        """Send the command that `make` builds from a call id, and waits for its answer.

        The task that reads replies with receive() must run meanwhile.
        """
        call_id, future = self._calls.open()
        self.send(make(call_id))
        return await future

    def fail_calls(self, error: LoramuxError) -> None:
        self._calls.fail(error)

    async def receive(self) -> Message | None:
        """Return the next reply that is no answer; None: it is dead."""
        while (reply := await self._channel.receive()) is not None:
            if not isinstance(reply, Answer):
                return reply
            self._calls.answer(reply)
        await self._examine()
        return None

    async def kill(self, cause: str) -> None:
        """Kills the process with SIGKILL, which also ends a stopped or hung one, and waits."""
        self._death = cause
        self._watcher.cancel()
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)
        await self._exit_status()
        self._channel.close()

    async def wait(self, timeout_s: float) -> None:
        """Wait for the process to end by itself after Shutdown, then kills it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._exit_status()
        await self.kill("it was shut down")

    async def _exit_status(self) -> int:
        """Wait for the end of the process without a thread, of which there may be none left."""
        while (status := self._popen.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return status

    async def _examine(self) -> None:
        """Find out how a process ended that was not killed here."""
        if self._death is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    self._death = f"{_ending(await self._exit_status())} {self._place}"

    @property
    def _place(self) -> str:
        return self._vitals.place if self._vitals.is_ready else f"while {self._phase}"

    async def _wait_until_ready(self, on_progress: OnProgress) -> None:
        while (reply := await self.receive()) is not None:
            match reply:
                case Progress(what=what, share=share):
                    self._phase = what
                    on_progress(what, share)
                case Failed(error=error):
                    raise decode_error(error)
                case Ready(card=card):
                    self._card = cast(CardT, card)
                    self._vitals.is_ready = True
                    return
        raise EngineDied(
            f"The engine did not start: {self.cause_of_death}.", kill_cause=self.kill_cause
        )

    async def _watch(self) -> None:
        """Kills a process that is dead although its socket looks alive."""
        was_quiet, looked_s = False, time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            # If this process itself was stopped, the engine may have been stopped with it.
            elapsed_s, looked_s = min(now - looked_s, 2 * _WATCH_S), now
            death = self._vitals.observe(self._pulse.counts, elapsed_s)
            if death is not None:
                self.kill_cause = death.cause
                place = "" if self._vitals.is_ready else f" {self._place}"
                self._death = f"the engine {death.text}{place}"
                # The end of file on the socket then wakes receive().
                self._popen.send_signal(signal.SIGKILL)
                return
            if self._vitals.is_ready and self._vitals.is_quiet != was_quiet:
                was_quiet = not was_quiet
                self._tell_quiet(was_quiet)

    def _tell_quiet(self, is_quiet: bool) -> None:
        if is_quiet:
            _log.warning(
                "engine %d has given no sign of life %s for %g s: it %s; new requests wait",
                *(self.pid, self._vitals.place, QUIET_S, self._vitals.doing),
            )
        else:
            _log.warning("engine %d goes on", self.pid)
        self.on_quiet(is_quiet)


def _ending(status: int) -> str:
    """Says how a process with this exit status ended."""
    if status >= 0:
        return f"the engine process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
    return f"the engine process was ended by {name}{hint},"
