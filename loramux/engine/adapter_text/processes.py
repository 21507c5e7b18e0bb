"""The processes that interpret files of adapters, as the server sees them; any thread may ask."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loramux.adapters.peft.refusals import RefusalCode
from loramux.base.process_environment import DEFAULTS
from loramux.engine.adapter_text import wire
from loramux.engine.adapter_text.description import Description
from loramux.engine.adapter_text.limits import (
    MAX_FRAME_BYTES,
    call_seconds,
    wall_seconds,
)
from loramux.errors import AdapterRefused, EngineStopped, InvalidRequest, RequestTimeout

MAX_WEIGHT = 24
"""Processes that are kept: each counts 1, or 3 with a vocabulary of its own."""
_OWN_WEIGHT = 3
_READY_S = 120.0
# Its computing time ends a process long before, unless the disk or other programs hold it up.
_READING_S = 120.0
_REPLY_BYTES = 64
# No keys and passwords of the server.
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Source:
    """The tokenizer files of an adapter: equal for adapters with equal files."""

    digest: str
    vocab_size: int
    """Rows of the adapter's embedding."""
    folder: str = field(compare=False)


class Died(Exception):
    """A process ended before it answered."""

    def __init__(self, status: int, *, is_late: bool) -> None:
        super().__init__(f"status {status}")
        self.is_late = is_late
        self.is_slow = status == -signal.SIGPROF

    @property
    def cause(self) -> str:
        if self.is_slow:
            return "takes more computing than it may"
        return "needs more memory than it may, or is nested too deeply"


class AdapterProcesses:
    """A process for each adapter with tokenizer files of its own; those used last are kept."""

    def __init__(self, base_folder: Path, chat_template: str | None) -> None:
        """`chat_template`: replaces that of the base's folder."""
        self._forks = ForkServer(base_folder, chat_template)
        self._slots: OrderedDict[Source, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, source: Source) -> Description:
        """Lets a process read the files; raises AdapterRefused."""
        with self._slot(source, _OWN_WEIGHT) as slot:
            description = self._start(slot, source, _reading(source))
            if description.shares_vocabulary:
                # The next process needs no files, and shares the memory of the base.
                slot.end()
        return description

    def ask(self, source: Source, description: Description, fields: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a request; raise InvalidRequest if it breaks a limit."""
        request = wire.encode_request(fields)
        shares = description.shares_vocabulary
        with self._slot(source, 1 if shares else _OWN_WEIGHT) as slot:
            if slot.process is None:
                self._start(slot, source, _rendering(description) if shares else _reading(source))
            assert slot.process is not None
            try:
                limit_s = wall_seconds(call_seconds(len(request)))
                return wire.read_ids(slot.process.call(request, limit_s))
            except Died as error:
                slot.process = None
                if error.is_late:
                    raise _late() from error
                raise _broke_limit(error, is_chat="conversation" in fields) from error

    def close(self) -> None:
        with self._lock:
            slots = list(self._slots.values())
            self._slots.clear()
        for slot in slots:
            with slot.lock:
                slot.end()
                slot.is_removed = True
        self._forks.close()

    def _start(self, slot: _Slot, source: Source, first: Mapping[str, Any]) -> Description:
        slot.end()
        try:
            process = AdapterProcess(self._forks)
            try:
                message = process.call(json.dumps(first).encode(), _READING_S)
                description = wire.read_description(message)
            except Died:
                raise
            except BaseException:
                process.end()
                raise
        except Died as error:
            if error.is_late:
                raise _late() from error
            raise AdapterRefused(
                RefusalCode.BROKEN_TOKENIZER,
                f"Reading the tokenizer of the adapter {error.cause}.",
                fix="Save the tokenizer that the adapter was trained with again, or remove its "
                "files from the folder to use that of the base.",
            ) from error
        slot.process = process
        return description

    @contextmanager
    def _slot(self, source: Source, weight: int) -> Iterator[_Slot]:
        """Yield the place of the adapter's process, alone."""
        while True:
            with self._lock:
                slot = self._slots.setdefault(source, _Slot(weight))
                slot.weight = weight
                self._slots.move_to_end(source)
            with slot.lock:
                if slot.is_removed:
                    continue
                yield slot
                break
        self._evict()

    def _evict(self) -> None:
        """End idle processes until those that are left are few enough."""
        with self._lock:
            total = sum(slot.weight for slot in self._slots.values())
            for source, slot in list(self._slots.items()):
                if total <= MAX_WEIGHT:
                    return
                if slot.lock.acquire(blocking=False):
                    slot.end()
                    slot.is_removed = True
                    slot.lock.release()
                    total -= slot.weight
                    del self._slots[source]


class _Slot:
    def __init__(self, weight: int) -> None:
        self.lock = threading.Lock()
        self.weight = weight
        self.process: AdapterProcess | None = None
        self.is_removed = False

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None


class AdapterProcess:
    """A process that answers one message after another."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks = forks
        self._connection, theirs = socket.socketpair()
        # The process ends by itself when its connection is closed.
        self._close = weakref.finalize(self, self._connection.close)
        with closing(theirs):
            try:
                self._pid = forks.fork(theirs)
            except BaseException:
                self._close()
                raise

    def call(self, request: bytes, limit_s: float) -> bytes:
        """Return the answer; raise Died, and the process is gone then."""
        deadline = time.monotonic() + limit_s
        try:
            self._connection.settimeout(limit_s)
            wire.send_request(self._connection, request)
            return wire.receive(self._connection, limit=MAX_FRAME_BYTES, deadline=deadline)
        except TimeoutError as error:
            raise Died(self.end(), is_late=True) from error
        except (OSError, wire.Closed) as error:
            raise Died(self.end(), is_late=False) from error

    def end(self) -> int:
        """End the process; return its exit status, or minus the signal that ended it."""
        self._close()
        return self._forks.end(self._pid)


class ForkServer:
    """Starts `fork_server.py` when the first process is needed, and again if it has ended."""

    def __init__(self, base_folder: Path, chat_template: str | None) -> None:
        self._settings = {"folder": str(base_folder), "chat_template": chat_template}
        self._running: _Running | None = None
        self._lock = threading.Lock()

    def fork(self, connection: socket.socket) -> int:
        """Return the id of a process that serves the connection."""
        with self._lock:
            if self._running is None or not self._running.is_alive:
                self._stop()
                self._running = _Running(self._settings)
            pid = int(self._running.command("fork", connection))
        if pid == 0:
            raise EngineStopped("This machine cannot start a process for the adapter now.")
        return pid

    def end(self, pid: int) -> int:
        with self._lock:
            if self._running is None or not self._running.is_alive:
                return -signal.SIGKILL
            return int(self._running.command(f"end {pid}"))

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


class _Running:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        scratch = TemporaryDirectory(prefix="loramux-tokenizers-")
        self._control, theirs = socket.socketpair()
        with closing(theirs):
            self._popen = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.fork_server", str(theirs.fileno())],
                env=_environment(),
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                # ctrl-c in a terminal is for the server, which finishes its requests.
                process_group=0,
            )
        self.close = weakref.finalize(self, _close, self._popen, self._control, scratch)
        assert self._popen.stdin is not None
        try:
            with self._popen.stdin as stdin:
                stdin.write(json.dumps({**settings, "scratch": scratch.name}).encode())
        except OSError as error:
            raise self._ended() from error
        self._control.settimeout(_READY_S)
        self._read()

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def command(self, text: str, passed: socket.socket | None = None) -> bytes:
        try:
            if passed is None:
                self._control.send(text.encode())
            else:
                socket.send_fds(self._control, [text.encode()], [passed.fileno()])
        except OSError as error:
            raise self._ended() from error
        return self._read()

    def _read(self) -> bytes:
        try:
            reply = self._control.recv(_REPLY_BYTES)
        except OSError as error:
            raise self._ended() from error
        if not reply:
            raise self._ended()
        return reply

    def _ended(self) -> EngineStopped:
        self.close()
        return EngineStopped("The process that reads tokenizers of adapters ended; try again.")


def _close(
    popen: subprocess.Popen[bytes], control: socket.socket, scratch: TemporaryDirectory[str]
) -> None:
    control.close()
    popen.kill()
    popen.wait()
    scratch.cleanup()


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or name.startswith("PYTHON")
    }
    return {**DEFAULTS, **kept, **_ONE_THREAD}


def _reading(source: Source) -> dict[str, Any]:
    return {
        "folder": source.folder,
        "digest": source.digest,
        "vocab_size": source.vocab_size,
    }


def _rendering(description: Description) -> dict[str, Any]:
    return {"templates": description.templates, "tokens": description.tokens}


def _late() -> RequestTimeout:
    return RequestTimeout(
        "The tokenizer of this adapter did not answer in time: the machine is too busy."
    )


def _broke_limit(error: Died, *, is_chat: bool) -> InvalidRequest:
    if is_chat:
        return InvalidRequest(
            f"The chat template of this adapter {error.cause} with these messages.",
            param="messages",
        )
    return InvalidRequest(f"The tokenizer of this adapter {error.cause} with this text.")
