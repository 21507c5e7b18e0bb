"""Starts the engine process, watches its heartbeat, and matches calls with their answers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, Self, cast

from loramux.errors import EngineStopped, LoramuxError
from loramux.worker.channel import ServerChannel
from loramux.worker.messages import (
    AdapterT,
    Answer,
    CardT,
    Failed,
    Heartbeat,
    Message,
    Progress,
    Ready,
    decode_error,
)
from loramux.worker.spawn import SpawnedWorker, spawn_worker

# A thread of the engine sends two heartbeats a second; only a stopped process misses this many.
SILENCE_LIMIT_S = 4.0
# Before the first heartbeat the process imports torch, which is slow on a busy machine.
STARTUP_LIMIT_S = 300.0
_WATCH_S = 0.5
_POLL_S = 0.01

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What the supervisor knows of a kind of engine process."""

    module: str
    """What the process runs."""
    replies: Any
    """The union of the messages that it sends."""
    step_limit_s: float
    """A step that takes this long is a deadlock in native code."""


class PendingCalls(Generic[AdapterT]):
    """Futures of the commands that the engine answers individually, by call id."""

    def __init__(self) -> None:
        self._ids = count()
        self._futures: dict[int, asyncio.Future[Answer[AdapterT]]] = {}
        self._error: LoramuxError | None = None

    def open(self) -> tuple[int, asyncio.Future[Answer[AdapterT]]]:
        """Returns a new call id and its future; raises the error of fail() once it was called."""
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

    def __init__(
        self, popen: subprocess.Popen[bytes], channel: ServerChannel, step_limit_s: float
    ) -> None:
        self._popen = popen
        self._channel = channel
        self._step_limit_s = step_limit_s
        self._last_heard = time.monotonic()
        self._silence_limit_s = STARTUP_LIMIT_S
        self._watcher = asyncio.create_task(self._watch())
        self._step_age_s = 0.0
        self._calls = PendingCalls[AdapterT]()
        self._card: CardT | None = None
        self.cause_of_death = "the engine process ended"

    @classmethod
    async def open(
        cls,
        kind: EngineKind,
        start: Message,
        on_progress: OnProgress,
        worker: SpawnedWorker | None = None,
    ) -> Self:
        """Returns when the engine is ready; raises the error that prevents its start.

        `worker`: a process that was spawned before; None spawns one.
        """
        worker = worker or spawn_worker(kind.module)
        try:
            channel = await ServerChannel.open(worker.connection, kind.replies)
        except BaseException:
            worker.close()
            raise
        process = cls(worker.popen, channel, kind.step_limit_s)
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
    def card(self) -> CardT:
        assert self._card is not None, "the process is not ready"
        return self._card

    def send(self, command: Message) -> None:
        self._channel.send(command)

    async def call(self, make: Callable[[int], Message]) -> Answer[AdapterT]:
        """Sends the command that `make` builds from a call id, and waits for its answer.

        The task that reads replies with receive() must run meanwhile.
        """
        call_id, future = self._calls.open()
        self.send(make(call_id))
        return await future

    def fail_calls(self, error: LoramuxError) -> None:
        self._calls.fail(error)

    async def receive(self) -> Message | None:
        """Returns the next reply that is neither a heartbeat nor an answer; None: it is dead."""
        while (reply := await self._channel.receive()) is not None:
            self._last_heard = time.monotonic()
            self._silence_limit_s = SILENCE_LIMIT_S
            if isinstance(reply, Heartbeat):
                self._step_age_s = reply.step_age_s
            elif isinstance(reply, Answer):
                self._calls.answer(reply)
            else:
                return reply
        return None

    async def kill(self, cause: str) -> None:
        """Kills the process with SIGKILL, which also ends a stopped or hung one, and waits."""
        self.cause_of_death = cause
        self._watcher.cancel()
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)
        await self._exit_status()
        self._channel.close()

    async def wait(self, timeout_s: float) -> None:
        """Waits for the process to end by itself after Shutdown, then kills it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._exit_status()
        await self.kill("it was shut down")

    async def _exit_status(self) -> int:
        """Waits for the end of the process without a thread, of which there may be none left."""
        while (status := self._popen.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return status

    async def _wait_until_ready(self, on_progress: OnProgress) -> None:
        while (reply := await self.receive()) is not None:
            match reply:
                case Progress(what=what, share=share):
                    on_progress(what, share)
                case Failed(error=error):
                    raise decode_error(error)
                case Ready(card=card):
                    self._card = cast(CardT, card)
                    return
        status = await self._exit_status()
        raise EngineStopped(f"The engine process ended with status {status} before it was ready.")

    async def _watch(self) -> None:
        """Kills a process without heartbeats or with a hung step; its socket still looks alive."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - began > 2 * _WATCH_S:
                # This process itself was stopped, and the engine's messages are still unread.
                self._last_heard = now
            silent_s = now - self._last_heard
            if silent_s > self._silence_limit_s:
                self.cause_of_death = f"the engine gave no sign of life for {silent_s:.1f} s"
            elif self._step_age_s > self._step_limit_s:
                self.cause_of_death = f"the engine hung in a step for {self._step_age_s:.0f} s"
            else:
                continue
            # The end of file on the socket then wakes receive().
            self._popen.send_signal(signal.SIGKILL)
            return
