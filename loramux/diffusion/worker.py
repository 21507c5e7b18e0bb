"""The process of an image engine: `python -m loramux.diffusion.worker FD` runs the step loop."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import diffusers
import transformers

from loramux.device_choice import choose_device
from loramux.diffusion.catalog import ReadAdapter
from loramux.diffusion.digest import pipeline_digest
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.memory import MemoryOptions
from loramux.diffusion.messages import Command, Draw, Report, StartImages
from loramux.diffusion.options import ImageEngineOptions
from loramux.diffusion.pipeline import load_pipeline
from loramux.diffusion.source import fit_source
from loramux.diffusion.stats import adapter_uses, engine_stats
from loramux.diffusion.updates import UpdateSender
from loramux.errors import LoramuxError
from loramux.image_backend import ImageAdapterCard, ImageCard
from loramux.log_lines import use_one_line_records
from loramux.memory.usage import UsageFile
from loramux.worker.channel import EngineChannel
from loramux.worker.heartbeat import HeartbeatThread
from loramux.worker.messages import (
    Abort,
    Adopt,
    Answer,
    Examine,
    Failed,
    ListUses,
    Message,
    Pin,
    Prewarm,
    Progress,
    Ready,
    Refused,
    Register,
    RegisterMany,
    Registration,
    Remove,
    ResidencyUpdate,
    Verify,
    encode_error,
)

_log = logging.getLogger(__name__)
_STATS_INTERVAL_S = 0.2
_NUM_READERS = 2
_NUM_LOADERS = 2
# With this set in its environment, the engine checks its pages, leases and queues after every step,
# and dies of what it finds: for tests of faults.
CHECKING = "LORAMUX_CHECK_INTEGRITY"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A request whose source image has been decoded and scaled."""

    draw: Draw


class Moved:
    """Wakes the loop: a thread has moved an adapter between the tiers."""


class ImageWorker:
    """Runs the step loop, and carries out the server's commands between steps."""

    def __init__(
        self,
        engine: ImageEngine,
        channel: EngineChannel,
        heart: HeartbeatThread,
        usage: UsageFile | None = None,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._heart = heart
        self._usage = usage
        self._updates = UpdateSender(channel.send)
        self._inbox: queue.SimpleQueue[Command | ReadAdapter | Fitted | Moved] = queue.SimpleQueue()
        # Adapters are read and checked on other threads, so that the step loop goes on.
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="read")
        # Requests whose source images are being decoded there.
        self._fitting: set[str] = set()
        self._stats_sent_s = 0.0
        # False after any change since the last report; an idle engine must have reported it.
        self._is_reported = False
        self._residency_version = 0
        self._is_open = True
        self._is_checking = bool(os.environ.get(CHECKING))
        self._loop_thread = 0

    def run(self) -> None:
        self._loop_thread = threading.get_ident()
        self._engine.memory.placement.moves.on_move = self._wake_after_move
        threading.Thread(target=self._receive_commands, daemon=True, name="commands").start()
        while self._is_open:
            self._handle_commands()
            if self._is_open and self._engine.has_work:
                self._step()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._updates.stop()
        if self._usage is not None:
            records = self._engine.memory.residency.records.values()
            self._usage.save({r.cid: r.hits + r.misses for r in records if r.hits + r.misses})

    def _step(self) -> None:
        self._heart.begin_step()
        events = self._engine.step()
        self._heart.end_step()
        if self._is_checking:
            self._engine.check_integrity()
        for event in events:
            self._updates.put(event)
        self._is_reported = False
        if time.monotonic() - self._stats_sent_s > _STATS_INTERVAL_S:
            self._send_stats()

    def _send_stats(self) -> None:
        self._stats_sent_s = time.monotonic()
        self._is_reported = True
        stats = engine_stats(self._engine)
        self._channel.send(Report(stats=stats, residency=self._residency_update()))

    def _residency_update(self) -> ResidencyUpdate | None:
        placement = self._engine.memory.placement
        if placement.moves.version == self._residency_version:
            return None
        changes = placement.changes_since(self._residency_version)
        self._residency_version = changes.version
        return ResidencyUpdate(changes.tiers, changes.is_full)

    def _wake_after_move(self) -> None:
        if threading.get_ident() != self._loop_thread and self._inbox.empty():
            self._inbox.put(Moved())

    def _receive_commands(self) -> None:
        while (command := self._channel.receive()) is not None:
            self._inbox.put(cast(Command, command))
        # The server is gone, and a step may take minutes.
        os._exit(1)

    def _handle_commands(self) -> None:
        """Handles the commands that have arrived; blocks only while there is nothing to draw."""
        while self._is_open:
            is_idle = not self._engine.has_work
            if is_idle and not self._is_reported:
                self._send_stats()
            try:
                command = self._inbox.get(block=is_idle)
            except queue.Empty:
                return
            self._handle_command(command)
            self._is_reported = False

    def _handle_command(self, command: Command | ReadAdapter | Fitted | Moved) -> None:
        match command:
            case Moved():
                pass
            case Draw(request=request) if request.source is None:
                self._draw(command)
            case Draw(request=request):
                self._fitting.add(request.request_id)
                self._readers.submit(self._fit, command)
            case Fitted(draw=draw):
                # It may have been aborted meanwhile.
                if draw.request.request_id in self._fitting:
                    self._fitting.discard(draw.request.request_id)
                    self._draw(draw)
            case Abort(request_id=request_id):
                self._fitting.discard(request_id)
                self._engine.abort(request_id)
                self._updates.close(request_id)
            case ReadAdapter():
                self._engine.admit(command)
            case Register() | RegisterMany() | Verify() | Examine():
                self._start_reading(command)
            case Adopt() | Remove() | Pin() | Prewarm() | ListUses():
                self._handle_adapter_command(command)
            case _:
                self._is_open = False

    def _draw(self, draw: Draw) -> None:
        request_id = draw.request.request_id
        try:
            self._engine.add(draw.request)
        except Exception as error:  # The client waits for an answer, whatever it is.
            self._channel.send(Refused(request_id=request_id, error=encode_error(error)))
        else:
            self._updates.open(request_id, draw.form)

    def _fit(self, draw: Draw) -> None:
        """Decodes a source image on a thread, so that the step loop goes on."""
        request = draw.request
        try:
            fitted = fit_source(request)
        except Exception as error:  # The client waits for an answer, whatever it is.
            self._send_from_thread(
                Refused(request_id=request.request_id, error=encode_error(error))
            )
        else:
            self._inbox.put(Fitted(Draw(request=fitted, form=draw.form)))

    def _start_reading(self, command: Register | RegisterMany | Verify | Examine) -> None:
        """Starts a command that reads files on a thread, which sends the answer."""
        match command:
            case Register(path=path):
                self._answer(command.call_id, lambda answer: self._register(path, answer))
            case RegisterMany(paths=paths):
                self._readers.submit(self._register_many, command.call_id, paths)
            case Verify(cid=cid):

                def verify(answer: Answer[ImageAdapterCard]) -> None:
                    answer.adapter = self._engine.memory.catalog.verify(cid)

                self._answer(command.call_id, verify)
            case Examine(path=path):

                def examine(answer: Answer[ImageAdapterCard]) -> None:
                    answer.report = self._engine.memory.catalog.examine(Path(path))

                self._answer(command.call_id, examine)

    def _answer(self, call_id: int, fill: Callable[[Answer[ImageAdapterCard]], None]) -> None:
        """Lets a thread fill and send an answer."""

        def work() -> None:
            answer = Answer[ImageAdapterCard](call_id=call_id)
            try:
                fill(answer)
            except Exception as error:  # The caller waits for an answer, whatever the error is.
                answer = Answer(call_id=call_id, error=encode_error(error))
            self._send_from_thread(answer)

        self._readers.submit(work)

    def _register(self, path: str, answer: Answer[ImageAdapterCard]) -> None:
        found = self._engine.memory.catalog.identify(Path(path))
        # Before the answer: requests for the adapter follow it in the inbox.
        self._inbox.put(found)
        answer.adapter = found.card
        self._readers.submit(self._engine.memory.write_disk, found)

    def _register_many(self, call_id: int, paths: tuple[str, ...]) -> None:
        registrations = []
        for path in paths:
            answer = Answer[ImageAdapterCard](call_id=call_id)
            try:
                self._register(path, answer)
            except Exception as error:  # The caller waits for an answer, whatever the error is.
                registrations.append(Registration[ImageAdapterCard](error=encode_error(error)))
            else:
                registrations.append(Registration(adapter=answer.adapter))
        self._send_from_thread(Answer(call_id=call_id, registrations=registrations))

    def _send_from_thread(self, message: Message) -> None:
        # If the server is gone, the receiving thread ends the process.
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def _handle_adapter_command(
        self, command: Adopt[ImageAdapterCard] | Remove | Pin | Prewarm | ListUses
    ) -> None:
        engine, residency = self._engine, self._engine.memory.residency
        match command:
            case Adopt(card=card):
                engine.adopt(card)
            case Remove(cid=cid):
                with contextlib.suppress(LoramuxError):
                    engine.remove_adapter(cid)
            case Pin(call_id=call_id, cid=cid, is_pinned=is_pinned):
                answer = Answer[ImageAdapterCard](call_id=call_id)
                try:
                    residency.pin(cid, is_pinned=is_pinned)
                    residency.poll()
                except LoramuxError as error:
                    answer.error = encode_error(error)
                self._channel.send(answer)
            case Prewarm(cids=cids, num_busiest=num_busiest):
                known = [card.cid for card in engine.memory.catalog.known()]
                busiest = [] if self._usage is None else self._usage.busiest(known, num_busiest)
                residency.prewarm([*(cid for cid in cids if cid in known), *busiest])
                residency.poll()
            case ListUses(call_id=call_id):
                self._channel.send(Answer(call_id=call_id, uses=adapter_uses(engine)))


def serve(connection: socket.socket) -> int:
    """Serves the server at the other end of the socket; returns the exit status."""
    channel = EngineChannel(connection, Command)
    start = channel.receive()
    if not isinstance(start, StartImages):
        return 1
    heart = HeartbeatThread(channel)
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
    try:
        options = ImageEngineOptions.from_wire(start.options)
        channel.send(Progress(what="Loading the image model", share=0.0))
        engine, card = open_engine(options)
        channel.send(Ready(card=card))
    except (LoramuxError, OSError, MemoryError) as error:
        # The operator reads it, who may know the paths.
        known = error if isinstance(error, LoramuxError) else LoramuxError(repr(error))
        with contextlib.suppress(ConnectionError):  # The server itself may be gone.
            channel.send(Failed(error=encode_error(known)))
        channel.close()
        return 1
    usage = None if options.disk_folder is None else UsageFile(options.disk_folder)
    try:
        ImageWorker(engine, channel, heart, usage).run()
    except ConnectionError:
        # The server died while this process was sending.
        return 1
    return 0


def open_engine(options: ImageEngineOptions) -> tuple[ImageEngine, ImageCard]:
    began = time.monotonic()
    choice = choose_device(options.device)
    if choice.reason is not None:
        _log.warning("The image model is on the CPU, not on the GPU: %s", choice.reason)
    pipe = load_pipeline(options.model, dtype=options.dtype, device=choice.device)
    loaded = time.monotonic()
    memory = MemoryOptions(
        device_bytes=options.adapter_memory_bytes,
        host_bytes=options.host_memory_bytes,
        disk_folder=options.disk_folder,
        disk_bytes=options.disk_space_bytes,
        eviction=options.eviction,
    )
    loads = ThreadPoolExecutor(_NUM_LOADERS, thread_name_prefix="loader")
    engine = ImageEngine(pipe, options.limits, memory=memory, loads=loads)
    engine.warm_up()
    warm = time.monotonic()
    family, pages = engine.family, engine.memory.tier.pages
    disk = engine.memory.tiers.disk
    digest = pipeline_digest(pipe)
    card = ImageCard(
        name=options.served_name or options.model.resolve().name,
        path=str(options.model),
        digest=digest,
        family=family.name,
        dtype=str(family.dtype).removeprefix("torch."),
        device=choice.device,
        gpu_name=choice.gpu_name,
        pool_bytes=pages.num_pages * memory.page_bytes,
        num_pages=pages.num_pages,
        max_sequences=options.limits.max_images,
        host_memory_bytes=engine.memory.tiers.host.budget_bytes,
        disk_space_bytes=0 if disk is None else disk.budget_bytes,
        default_size=family.default_size,
        size_factor=family.size_factor,
        default_steps=family.default_steps,
        max_tokens=options.limits.max_tokens,
        takes_guidance=family.takes_guidance,
        takes_true_cfg=family.guidance_name == "true_cfg_scale",
        samplers=engine.samplers.names,
        start_seconds={
            "load": loaded - began,
            "warm-up": warm - loaded,
            "digest": time.monotonic() - warm,
        },
    )
    return engine, card


if __name__ == "__main__":
    # The server stops the engine, after it has drained its requests; a Ctrl-C in its terminal or a
    # SIGTERM to the group of processes must not end the engine first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    use_one_line_records()
    status = serve(socket.socket(fileno=int(sys.argv[1])))
    # Daemon threads may still hold the socket, and nothing is left to clean up.
    os._exit(status)
