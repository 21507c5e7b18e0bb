"""The process of an engine: commands of the server between steps, and reports after them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from loramux.backend.host import AdapterUse, HostCard
from loramux.base.log_lines import use_one_line_records
from loramux.errors import LoramuxError
from loramux.types.adapter import AdapterCard
from loramux.worker.channel import EngineChannel
from loramux.worker.heartbeat import beating
from loramux.worker.messages import (
    Adopt,
    Answer,
    Failed,
    ListUses,
    Message,
    Pin,
    Prewarm,
    Ready,
    Registration,
    Remove,
    ResidencyUpdate,
    Shutdown,
    encode_error,
)
from loramux.worker.pulse import Pulse

if TYPE_CHECKING:
    from loramux.memory.records import Placement
    from loramux.memory.residency import AdapterResidency
    from loramux.memory.usage import UsageFile

# Statistics are reported this often while the engine works, and before it becomes idle.
_STATS_INTERVAL_S = 0.2
# With this set in its environment, the engine checks its pages, leases and queues after every step,
# and dies of what it finds: for tests of faults.
_CHECKING = "LORAMUX_CHECK_INTEGRITY"

AdapterT = TypeVar("AdapterT", bound=AdapterCard)
EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)
StartT = TypeVar("StartT", bound=Message)
Fill = Callable[[Answer[AdapterT]], None]


class Steps(Protocol[EventT_co]):
    """What a step loop needs of an engine."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> Iterable[EventT_co]: ...

    def check_integrity(self) -> None: ...


class Moved:
    """Wakes the loop: a thread has moved an adapter between the tiers."""


class StepLoop(ABC, Generic[EventT, AdapterT]):
    """Runs the steps of an engine, and carries out the server's commands between them."""

    def __init__(
        self,
        engine: Steps[EventT],
        residency: AdapterResidency,
        placement: Placement,
        channel: EngineChannel,
        pulse: Pulse,
        usage: UsageFile | None = None,
    ) -> None:
        self._steps = engine
        self._residency = residency
        self._placement = placement
        self._channel = channel
        self._pulse = pulse
        self._usage = usage
        # Commands, None once the server is gone, and what threads hand to the loop.
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stats_sent_s = 0.0
        # False after any change since the last report; an idle engine must have reported it.
        self._is_reported = False
        self._residency_version = 0
        self._is_open = True
        self._is_checking = bool(os.environ.get(_CHECKING))
        self._thread = 0

    @abstractmethod
    def _handle(self, item: Any) -> None:
        """Handle an item of the inbox that is not common to all engines."""

    @abstractmethod
    def _send_events(self, events: list[EventT]) -> None:
        """Send what a step has made; `_send_stats` where a report is due."""

    @abstractmethod
    def _report(self, events: list[EventT]) -> Message:
        """Make a message with statistics, with the events that have not been sent."""

    @abstractmethod
    def _known(self) -> Iterable[AdapterCard]:
        """Return the adapters of the catalog."""

    @abstractmethod
    def _adopt(self, card: AdapterT) -> None: ...

    @abstractmethod
    def _remove(self, cid: str) -> None: ...

    @abstractmethod
    def _uses(self) -> list[AdapterUse]: ...

    def _work_while_idle(self) -> bool:
        """Do a piece of work while there is no command; False: there is none left."""
        return False

    def _server_is_gone(self) -> None:
        """Take a command; called by the thread that receives them."""
        self._inbox.put(None)

    def run(self) -> None:
        self._thread = threading.get_ident()
        self._placement.moves.on_move = self._wake_after_move
        threading.Thread(target=self._receive_commands, daemon=True, name="commands").start()
        while self._is_open:
            self._handle_commands()
            if self._is_open and self._steps.has_work:
                self._step()
        self._save_usage()

    def _step(self) -> None:
        self._pulse.begin_step()
        events = list(self._steps.step())
        self._pulse.end_step()
        if self._is_checking:
            self._steps.check_integrity()
        self._is_reported = False
        self._send_events(events)

    @property
    def _is_report_due(self) -> bool:
        return time.monotonic() - self._stats_sent_s > _STATS_INTERVAL_S

    def _send_stats(self, events: list[EventT]) -> None:
        self._stats_sent_s = time.monotonic()
        self._is_reported = True
        self._channel.send(self._report(events))

    def _residency_update(self) -> ResidencyUpdate | None:
        """Return what has moved since the last call; None: nothing."""
        if self._placement.moves.version == self._residency_version:
            return None
        changes = self._placement.changes_since(self._residency_version)
        self._residency_version = changes.version
        return ResidencyUpdate(changes.tiers, changes.is_full)

    def _wake_after_move(self) -> None:
        """Lets an idle loop report what another thread moved, such as an image to the disk."""
        if threading.get_ident() != self._thread and self._inbox.empty():
            self._inbox.put(Moved())

    def _save_usage(self) -> None:
        if self._usage is not None:
            records = self._residency.records.values()
            self._usage.save({r.cid: r.hits + r.misses for r in records if r.hits + r.misses})

    def _receive_commands(self) -> None:
        while (command := self._channel.receive()) is not None:
            self._inbox.put(command)
        self._server_is_gone()

    def _handle_commands(self) -> None:
        """Handle the commands that have arrived; blocks only while there is nothing to compute."""
        while self._is_open:
            is_idle = not self._steps.has_work
            if is_idle and not self._is_reported:
                self._send_stats([])
            if is_idle and self._inbox.empty() and self._work_while_idle():
                continue
            try:
                item = self._inbox.get(block=is_idle)
            except queue.Empty:
                return
            self._handle_item(item)
            self._is_reported = False

    def _handle_item(self, item: Any) -> None:
        match item:
            case Moved():
                pass
            case None | Shutdown():
                self._is_open = False
            case Adopt(card=card):
                self._adopt(card)
            case Remove(cid=cid):
                self._remove(cid)
            case Pin():
                self._channel.send(self._pin(item))
            case Prewarm(cids=cids, num_busiest=count):
                known = dict.fromkeys(card.cid for card in self._known())
                busiest = [] if self._usage is None else self._usage.busiest(known, count)
                self._residency.prewarm([*(cid for cid in cids if cid in known), *busiest])
                self._residency.poll()
            case ListUses(call_id=call_id):
                self._channel.send(Answer(call_id=call_id, uses=self._uses()))
            case _:
                self._handle(item)

    def _pin(self, command: Pin) -> Answer[AdapterT]:
        try:
            self._residency.pin(command.cid, is_pinned=command.is_pinned)
            self._residency.poll()
        except LoramuxError as error:
            return Answer(call_id=command.call_id, error=encode_error(error))
        return Answer(call_id=command.call_id)

    def _answer_from(self, threads: Executor, call_id: int, fill: Fill[AdapterT]) -> None:
        """Lets one of the threads fill and send an answer."""

        def work() -> None:
            answer = Answer[AdapterT](call_id=call_id)
            try:
                fill(answer)
            except Exception as error:  # The caller waits for an answer, whatever the error is.
                answer = Answer(call_id=call_id, error=encode_error(error))
            self._send_from_thread(answer)

        threads.submit(work)

    def _send_from_thread(self, message: Message) -> None:
        # If the server is gone, the receiving thread ends the loop.
        with contextlib.suppress(OSError):
            self._channel.send(message)


def registration_of(
    register: Callable[[Path], Registration[AdapterT]], path: str
) -> Registration[AdapterT]:
    """Return what `register` does, or its error."""
    try:
        return register(Path(path))
    except Exception as error:  # The caller waits for an answer, whatever the error is.
        return Registration(error=encode_error(error))


OpenLoop = Callable[[StartT, EngineChannel, Pulse], tuple[HostCard, StepLoop[Any, Any]]]


def serve_engine(
    connection: socket.socket,
    pulse: Pulse,
    commands: Any,
    start: type[StartT],
    open_loop: OpenLoop[StartT],
) -> int:
    """Serve the server at the other end of the socket; return the exit status.

    `commands`: the union of the messages that the engine takes; `start`: the first of them.
    """
    with beating(pulse):
        return _serve_beating(EngineChannel(connection, commands), pulse, start, open_loop)


def _serve_beating(
    channel: EngineChannel, pulse: Pulse, start: type[StartT], open_loop: OpenLoop[StartT]
) -> int:
    first = channel.receive()
    if not isinstance(first, start):
        return 1
    try:
        card, loop = open_loop(first, channel, pulse)
        channel.send(Ready(card=card))
    except (LoramuxError, OSError, MemoryError) as error:
        # The operator reads it, who may know the paths.
        known = error if isinstance(error, LoramuxError) else LoramuxError(repr(error))
        with contextlib.suppress(ConnectionError):  # The server itself may be gone.
            channel.send(Failed(error=encode_error(known)))
        channel.close()
        return 1
    # The server may die while this process is sending.
    with contextlib.suppress(ConnectionError):
        loop.run()
        return 0
    return 1


def run_process(serve: Callable[[socket.socket, Pulse], int]) -> None:
    """Serve the socket and write the pulse whose descriptors are the arguments, then ends."""
    # The server stops the engine, after it has drained its requests; a Ctrl-C in its terminal or a
    # SIGTERM to the group of processes must not end the engine first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    use_one_line_records()
    connection, shared = map(int, sys.argv[1:3])
    pulse = Pulse(shared)
    os.close(shared)
    status = serve(socket.socket(fileno=connection), pulse)
    # Daemon threads may still hold the socket, and nothing is left to clean up.
    os._exit(status)
