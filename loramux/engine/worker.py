"""The engine process: `python -m loramux.engine.worker FD` runs the step loop."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

from loramux.adapters.catalog import IdentifiedAdapter
from loramux.backend import ModelCard
from loramux.config.engine import EngineConfig, ResolvedConfig
from loramux.device_choice import DeviceChoice, resolve_config
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.engine.gc_control import FullCollections
from loramux.engine.messages import Add, Command, Events, Finish, Identify, ListPages, Start
from loramux.engine.start_phases import StartPhases
from loramux.engine.stats import adapter_uses, engine_stats
from loramux.errors import LoramuxError
from loramux.log_lines import use_one_line_records
from loramux.memory.loader import lower_priority
from loramux.memory.usage import UsageFile
from loramux.models.architectures import base_info
from loramux.models.loader import LoadedModel
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.request import TokenEvent
from loramux.worker.channel import EngineChannel
from loramux.worker.heartbeat import HeartbeatThread
from loramux.worker.messages import (
    Abort,
    Adopt,
    Answer,
    Examine,
    Failed,
    ListUses,
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
    Shutdown,
    Verify,
    WireError,
    encode_error,
)

# Statistics are reported this often while the engine works, and before it becomes idle.
_STATS_INTERVAL_S = 0.2
_SAVE_USAGE_INTERVAL_S = 60.0
_NUM_HEADER_READERS = 4
# Adapters that are identified at once: steps on a CPU use the same cores.
_NUM_IDENTIFIERS = {"cpu": 2, "cuda": 4}
# With this set in its environment, the engine checks its pages, leases and queues after every step,
# and dies of what it finds: for tests of faults.
CHECKING = "LORAMUX_CHECK_INTEGRITY"


class Moved:
    """Wakes the loop: a thread has moved an adapter between the tiers."""


class Worker:
    """Runs the step loop, and carries out the server's commands between steps."""

    def __init__(
        self,
        engine: Engine,
        channel: EngineChannel,
        heart: HeartbeatThread,
        usage: UsageFile | None = None,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._heart = heart
        self._usage = usage
        self._collections = FullCollections(owns_process=True)
        self._usage_saved_s = time.monotonic()
        self._stats_sent_s = 0.0
        # False after any change since the last report; an idle engine must have reported it.
        self._is_reported = False
        self._residency_version = 0
        self._inbox: queue.SimpleQueue[Command | IdentifiedAdapter | Moved | None] = (
            queue.SimpleQueue()
        )
        # Adapters are read and checked on other threads, so that the step loop goes on.
        self._header_readers = _threads("headers", _NUM_HEADER_READERS)
        self._identifiers = _threads("identify", _NUM_IDENTIFIERS[engine.memory.pool.device.type])
        # Removed by the server, but still used by a sequence.
        self._removed: set[str] = set()
        self._num_steps = 0
        self._is_open = True
        self._is_checking = bool(os.environ.get(CHECKING))
        self._loop_thread = 0

    def run(self) -> None:
        self._loop_thread = threading.get_ident()
        self._engine.memory.placement.moves.on_move = self._wake_after_move
        threading.Thread(target=self._receive_commands, daemon=True, name="commands").start()
        with self._collections:
            while self._is_open:
                self._handle_commands()
                if self._engine.has_work:
                    self._step()
        for threads in (self._header_readers, self._identifiers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._save_usage()
        self._engine.close()

    def _step(self) -> None:
        self._heart.begin_step()
        events = self._engine.step()
        self._num_steps += 1
        self._heart.end_step()
        self._free_removed()
        if self._is_checking:
            self._engine.check_integrity()
        self._report(events)
        self._collections.after_step()

    def _report(self, events: list[TokenEvent]) -> None:
        """Sends the events, with statistics if they are due or the engine becomes idle."""
        now = time.monotonic()
        is_due = now - self._stats_sent_s > _STATS_INTERVAL_S
        self._is_reported = False
        if is_due or (events and not self._engine.has_work):
            self._send_stats(events)
        elif events:
            self._channel.send(Events(events=events))
        if now - self._usage_saved_s > _SAVE_USAGE_INTERVAL_S:
            self._usage_saved_s = now
            self._save_usage()

    def _send_stats(self, events: list[TokenEvent]) -> None:
        self._stats_sent_s = time.monotonic()
        self._is_reported = True
        stats = engine_stats(self._engine, num_steps=self._num_steps)
        self._channel.send(Events(events=events, stats=stats, residency=self._residency_update()))

    def _residency_update(self) -> ResidencyUpdate | None:
        placement = self._engine.memory.placement
        if placement.moves.version == self._residency_version:
            return None
        changes = placement.changes_since(self._residency_version)
        self._residency_version = changes.version
        return ResidencyUpdate(changes.tiers, changes.is_full)

    def _wake_after_move(self) -> None:
        """Lets an idle loop report what another thread moved, such as an image to the disk."""
        if threading.get_ident() != self._loop_thread and self._inbox.empty():
            self._inbox.put(Moved())

    def _save_usage(self) -> None:
        if self._usage is not None:
            records = self._engine.residency.records.values()
            self._usage.save({r.cid: r.hits + r.misses for r in records if r.hits + r.misses})

    def _receive_commands(self) -> None:
        command: Command | None = Shutdown()
        while command is not None:
            command = cast("Command | None", self._channel.receive())
            self._inbox.put(command)

    def _handle_commands(self) -> None:
        """Handles the commands that have arrived; blocks only while there is nothing to compute."""
        while self._is_open:
            is_idle = not self._engine.has_work
            if is_idle and not self._is_reported:
                self._send_stats([])
            if is_idle and self._inbox.empty():
                self._collections.while_idle()
                if self._engine.prepare_next():
                    continue
            try:
                command = self._inbox.get(block=is_idle)
            except queue.Empty:
                return
            self._handle_command(command)
            self._is_reported = False

    def _handle_command(self, command: Command | IdentifiedAdapter | Moved | None) -> None:
        match command:
            case Moved():
                pass
            case Add(request=request):
                try:
                    self._engine.add(request)
                except LoramuxError as error:
                    refusal = Refused(request_id=request.request_id, error=encode_error(error))
                    self._channel.send(refusal)
            case Abort(request_id=request_id):
                self._engine.abort(request_id)
            case Finish(request_id=request_id, index=index):
                self._engine.finish(request_id, index)
            case Register() | RegisterMany() | Identify() | Verify() | Examine():
                self._start_reading(command)
            case IdentifiedAdapter(card=card):
                self._removed.discard(card.cid)
                self._engine.memory.admit(command)
            case Adopt() | Remove() | Pin() | Prewarm() | ListUses():
                self._handle_adapter_command(command)
            case ListPages(call_id=call_id):
                self._channel.send(Answer(call_id=call_id, pages=self._engine.pages.kinds()))
            case _:
                self._is_open = False

    def _start_reading(
        self, command: Register | RegisterMany | Identify | Verify | Examine
    ) -> None:
        """Starts a command that reads files on a thread, which sends the answer."""
        match command:
            case Register(call_id=call_id, path=path, check="header"):
                self._header_readers.submit(self._inspect_one, call_id, path)
            case RegisterMany(call_id=call_id, paths=paths, check="header"):
                self._header_readers.submit(self._inspect_many, call_id, paths)
            case Register(call_id=call_id, path=path) | Identify(call_id=call_id, path=path):
                self._identifiers.submit(self._identify_one, call_id, path)
            case RegisterMany(call_id=call_id, paths=paths):
                self._identifiers.submit(self._identify_many, call_id, paths)
            case Verify(call_id=call_id, cid=cid):
                self._identifiers.submit(self._verify, call_id, cid)
            case Examine(call_id=call_id, path=path):
                self._identifiers.submit(self._examine, call_id, path)

    def _handle_adapter_command(
        self, command: Adopt[AdapterCard] | Remove | Pin | Prewarm | ListUses
    ) -> None:
        residency = self._engine.residency
        match command:
            case Adopt(card=card):
                self._removed.discard(card.cid)
                self._engine.catalog.adopt(card)
            case Remove(cid=cid):
                self._removed.add(cid)
                self._free_removed()
            case Pin(call_id=call_id, cid=cid, is_pinned=is_pinned):
                answer = Answer[AdapterCard](call_id=call_id)
                try:
                    residency.pin(cid, is_pinned=is_pinned)
                    residency.poll()
                except LoramuxError as error:
                    answer = Answer(call_id=call_id, error=encode_error(error))
                self._channel.send(answer)
            case Prewarm(cids=cids, num_busiest=num_busiest):
                known = [adapter.cid for adapter in self._engine.catalog.known()]
                busiest = [] if self._usage is None else self._usage.busiest(known, num_busiest)
                residency.prewarm([*cids, *busiest])
                residency.poll()
            case ListUses(call_id=call_id):
                self._channel.send(Answer(call_id=call_id, uses=adapter_uses(self._engine)))

    def _inspect_one(self, call_id: int, path: str) -> None:
        found = self._inspect(path)
        self._channel.send(
            Answer(
                call_id=call_id,
                adapter=found.adapter,
                inspected=found.inspected,
                error=found.error,
            )
        )

    def _inspect_many(self, call_id: int, paths: Sequence[str]) -> None:
        found = [self._inspect(path) for path in paths]
        self._channel.send(Answer(call_id=call_id, registrations=found))

    def _inspect(self, path: str) -> Registration[AdapterCard]:
        try:
            card = self._engine.catalog.inspect(Path(path))
        except Exception as error:  # The caller waits for an answer, whatever the error is.
            return Registration(error=encode_error(error))
        if isinstance(card, InspectedCard):
            return Registration(inspected=card)
        # Before the answer: requests for the adapter follow it in the inbox.
        self._inbox.put(Adopt(card=card))
        return Registration(adapter=card)

    def _identify_one(self, call_id: int, path: str) -> None:
        found = self._identify(path)
        if isinstance(found, WireError):
            self._channel.send(Answer(call_id=call_id, error=found))
            return
        self._channel.send(Answer(call_id=call_id, adapter=found.card))
        self._engine.memory.write_disk(found)

    def _identify_many(self, call_id: int, paths: Sequence[str]) -> None:
        registrations: list[Registration[AdapterCard]] = []
        for path in paths:
            found = self._identify(path)
            if isinstance(found, WireError):
                registrations.append(Registration(error=found))
            else:
                registrations.append(Registration(adapter=found.card))
                self._engine.memory.write_disk(found)
        self._channel.send(Answer(call_id=call_id, registrations=registrations))

    def _identify(self, path: str) -> IdentifiedAdapter | WireError:
        try:
            found = self._engine.memory.identify(Path(path))
        except Exception as error:  # The caller waits for an answer, whatever the error is.
            return encode_error(error)
        # Before the answer: requests for the adapter follow it in the inbox.
        self._inbox.put(found)
        return found

    def _verify(self, call_id: int, cid: str) -> None:
        try:
            known = self._engine.catalog.verify(cid)
        except Exception as error:  # The caller waits for an answer, whatever the error is.
            self._channel.send(Answer(call_id=call_id, error=encode_error(error)))
        else:
            self._channel.send(Answer(call_id=call_id, adapter=known))

    def _examine(self, call_id: int, path: str) -> None:
        try:
            report = self._engine.catalog.examine(Path(path))
        except Exception as error:  # The caller waits for an answer, whatever the error is.
            self._channel.send(Answer(call_id=call_id, error=encode_error(error)))
        else:
            self._channel.send(Answer(call_id=call_id, report=report.to_dict()))

    def _free_removed(self) -> None:
        self._removed = {cid for cid in self._removed if not self._engine.forget_adapter(cid)}


def _threads(name: str, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        max_workers=num_threads, thread_name_prefix=name, initializer=lower_priority
    )


def serve(connection: socket.socket) -> int:
    """Serves the server at the other end of the socket; returns the exit status."""
    channel = EngineChannel(connection, Command)
    start = channel.receive()
    if not isinstance(start, Start):
        return 1
    heart = HeartbeatThread(channel)
    try:
        config, choice = resolve_config(EngineConfig(**start.settings))
        phases = StartPhases(lambda what, share: channel.send(Progress(what=what, share=share)))
        model = load_base(Path(start.model), config, progress=phases)
        engine = build_engine(model, config, progress=phases)
        engine.constraints.use_tokenizer(model.tokenizer_folder, model.eos_token_ids)
        engine.constraints.prepare()
        card = _model_card(model, engine, start.model, config, choice)
        channel.send(Ready(card=replace(card, start_seconds=phases.seconds())))
    except (LoramuxError, OSError, MemoryError) as error:
        # The operator reads it, who may know the paths.
        known = error if isinstance(error, LoramuxError) else LoramuxError(repr(error))
        with contextlib.suppress(ConnectionError):  # The server itself may be gone.
            channel.send(Failed(error=encode_error(known)))
        channel.close()
        return 1
    try:
        usage = None if config.disk_folder is None else UsageFile(Path(config.disk_folder))
        Worker(engine, channel, heart, usage).run()
    except ConnectionError:
        # The server died while this process was sending.
        return 1
    return 0


def _model_card(
    model: LoadedModel, engine: Engine, path: str, config: ResolvedConfig, choice: DeviceChoice
) -> ModelCard:
    return ModelCard(
        name=model.name,
        path=path,
        digest=model.digest,
        max_model_len=engine.scheduler.config.max_model_len,
        vocab_size=engine.vocab_size,
        dtype=str(engine.executor.dtype).removeprefix("torch."),
        pool_bytes=engine.executor.pool_bytes,
        device=choice.device,
        gpu_name=choice.gpu_name,
        fallback_reason=choice.reason,
        num_pages=engine.pages.num_pages,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        tokenizer_folder=str(model.tokenizer_folder),
        eos_token_ids=tuple(model.eos_token_ids),
        block_tokens=engine.scheduler.config.block_tokens,
        shapes=base_info(model.config, model.name),
        packing="paged" if config.wants_device_kernels else "dense",
        pooling=engine.pooling,
        max_loras=engine.scheduler.config.max_loras,
        host_memory_bytes=config.host_memory_bytes,
        disk_space_bytes=0 if config.disk_folder is None else config.disk_space_bytes,
        adapter_memory_fraction=config.adapter_memory_fraction,
    )


if __name__ == "__main__":
    # The server stops the engine; a Ctrl-C in its terminal must not reach the engine first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_line_records()
    status = serve(socket.socket(fileno=int(sys.argv[1])))
    # Daemon threads may still hold the socket, and nothing is left to clean up.
    os._exit(status)
