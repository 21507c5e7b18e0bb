"""Starts the engine in a process of its own, and watches that it lives."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from loramux.engine.channel import ServerChannel
from loramux.engine.messages import Command, Failed, Heartbeat, Progress, Ready, Reply, Start
from loramux.engine.messages import make_error as _make_error
from loramux.errors import EngineStopped
from loramux.process_environment import child_environment

# The pulse beats twice a second from a thread of its own; only a stopped process misses so many.
SILENCE_LIMIT_S = 4.0
# Before the first beat the process imports torch, which a busy machine can make very slow.
STARTUP_LIMIT_S = 300.0
# No step of a sane batch takes this long; a deadlock in native code does.
STEP_LIMIT_S = 120.0
_WATCH_S = 0.5

OnProgress = Callable[[str, float], None]


class EngineProcess:
    """One life of the engine: open() until ready, then replies until receive() gives None."""

    def __init__(self, popen: subprocess.Popen[bytes], channel: ServerChannel) -> None:
        self._popen = popen
        self._channel = channel
        self._last_heard = time.monotonic()
        self._silence_limit_s = STARTUP_LIMIT_S
        self._watcher = asyncio.create_task(self._watch())
        self._step_age_s = 0.0
        self.ready: Ready | None = None
        self.cause_of_death = "the engine process ended"

    @classmethod
    async def open(cls, start: Start, on_progress: OnProgress) -> EngineProcess:
        """Returns when the engine is ready; raises what kept it from starting."""
        ours, theirs = socket.socketpair()
        popen = subprocess.Popen(
            [sys.executable, "-m", "loramux.engine.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        process = cls(popen, await ServerChannel.open(ours))
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

    def send(self, command: Command) -> None:
        self._channel.send(command)

    async def receive(self) -> Reply | None:
        """The next reply that matters to callers; None: this engine is dead."""
        while (reply := await self._channel.receive()) is not None:
            self._last_heard = time.monotonic()
            self._silence_limit_s = SILENCE_LIMIT_S
            if isinstance(reply, Heartbeat):
                self._step_age_s = reply.step_age_s
            else:
                return reply
        return None

    async def kill(self, cause: str) -> None:
        """Ends the process for certain, even if it is stopped or hung."""
        self.cause_of_death = cause
        self._watcher.cancel()
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._popen.wait)
        self._channel.close()

    async def wait(self, timeout_s: float) -> None:
        """After Shutdown: lets the process end by itself, then makes sure."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._popen.wait, timeout_s)
        await self.kill("it was shut down")

    async def _wait_until_ready(self, on_progress: OnProgress) -> None:
        while (reply := await self.receive()) is not None:
            match reply:
                case Progress(what=what, share=share):
                    on_progress(what, share)
                case Failed(error=error):
                    raise _make_error(error)
                case Ready():
                    self.ready = reply
                    return
        status = await asyncio.to_thread(self._popen.wait)
        raise EngineStopped(f"The engine process ended with status {status} before it was ready.")

    async def _watch(self) -> None:
        """A process that is stopped or stuck looks alive to the socket; the pulse tells."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - began > 2 * _WATCH_S:
                # It was this process that stood still: what the engine said meanwhile is unread.
                self._last_heard = now
            silent_s = now - self._last_heard
            if silent_s > self._silence_limit_s:
                self.cause_of_death = f"the engine gave no sign of life for {silent_s:.1f} s"
            elif self._step_age_s > STEP_LIMIT_S:
                self.cause_of_death = f"the engine hung in a step for {self._step_age_s:.0f} s"
            else:
                continue
            # The socket's end of file then wakes whoever waits in receive().
            self._popen.send_signal(signal.SIGKILL)
            return
