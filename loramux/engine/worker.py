"""The engine process: `python -m loramux.engine.worker FD`. Its GIL is the step loop's."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loramux.adapters.catalog import KnownAdapter
from loramux.config.engine import EngineConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.channel import EngineChannel
from loramux.engine.engine import Engine
from loramux.engine.garbage import FullCollections
from loramux.engine.messages import (
    Abort,
    AdapterFacts,
    Add,
    Answer,
    Command,
    Events,
    Failed,
    Finish,
    Forget,
    Heartbeat,
    ListUses,
    Pin,
    Prewarm,
    Progress,
    Ready,
    Refused,
    Register,
    Shutdown,
    Start,
    Verify,
    describe_error,
)
from loramux.engine.report import adapter_uses, take_snapshot
from loramux.engine.usage import UsageFile
from loramux.errors import LoramuxError
from loramux.memory.loader import step_back
from loramux.models.architectures import base_info
from loramux.models.loader import LoadedModel
from loramux.types.request import TokenEvent

_HEARTBEAT_S = 0.5
# While nothing happens but loads, the server hears of them this often.
_SNAPSHOT_S = 0.1
_USAGE_S = 60.0


class Worker:
    def __init__(
        self,
        engine: Engine,
        channel: EngineChannel,
        pulse: Pulse,
        usage: UsageFile | None = None,
    ) -> None:
        self._engine = engine
        self._usage = usage
        self._garbage = FullCollections(owns_process=True)
        self._usage_saved_s = time.monotonic()
        self._snapshot_sent_s = 0.0
        # Whether the server knows how things stand; it must before the engine falls idle.
        self._is_told = False
        self._channel = channel
        self._pulse = pulse
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # Reading and checking an adapter must not stop the step loop.
        self._readers = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="adapters", initializer=step_back
        )
        self._forgotten: set[str] = set()
        self._num_steps = 0
        self._is_open = True

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True, name="commands").start()
        with self._garbage:
            while self._is_open:
                self._obey_all()
                if self._engine.has_work:
                    self._step()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._save_usage()
        self._engine.close()

    def _step(self) -> None:
        self._pulse.begin_step()
        events = self._engine.step()
        self._num_steps += 1
        self._pulse.end_step()
        self._free_forgotten()
        self._report(events)
        self._garbage.after_step()

    def _report(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        self._is_told = False
        if events or now - self._snapshot_sent_s > _SNAPSHOT_S:
            self._tell(events)
        if now - self._usage_saved_s > _USAGE_S:
            self._usage_saved_s = now
            self._save_usage()

    def _tell(self, events: list[TokenEvent]) -> None:
        self._snapshot_sent_s = time.monotonic()
        self._is_told = True
        snapshot = take_snapshot(self._engine, num_steps=self._num_steps)
        self._channel.send(Events(events=events, snapshot=snapshot))

    def _save_usage(self) -> None:
        if self._usage is not None:
            records = self._engine.residency.records.values()
            self._usage.save({r.cid: r.hits + r.misses for r in records if r.hits + r.misses})

    def _listen(self) -> None:
        command: Command | None = Shutdown()
        while command is not None:
            command = self._channel.receive()
            self._inbox.put(command)

    def _obey_all(self) -> None:
        """Takes what has arrived; waits only when there is nothing to compute."""
        while self._is_open:
            is_idle = not self._engine.has_work
            if is_idle and not self._is_told:
                self._tell([])
            if is_idle and self._inbox.empty():
                self._garbage.while_idle()
            try:
                command = self._inbox.get(block=is_idle)
            except queue.Empty:
                return
            self._obey(command)
            self._is_told = False

    def _obey(self, command: Command | None) -> None:
        match command:
            case Add(request=request):
                try:
                    self._engine.add(request)
                except LoramuxError as error:
                    refusal = Refused(request_id=request.request_id, error=describe_error(error))
                    self._channel.send(refusal)
            case Abort(request_id=request_id):
                self._engine.abort(request_id)
            case Finish(request_id=request_id, index=index):
                self._engine.finish(request_id, index)
            case Register(call_id=call_id, path=path):
                self._readers.submit(self._register, call_id, Path(path))
            case Verify(call_id=call_id, cid=cid):
                self._readers.submit(self._verify, call_id, cid)
            case Forget(cid=cid):
                self._forgotten.add(cid)
                self._free_forgotten()
            case Pin() | Prewarm() | ListUses():
                self._manage(command)
            case _:
                self._is_open = False

    def _manage(self, command: Pin | Prewarm | ListUses) -> None:
        residency = self._engine.residency
        match command:
            case Pin(call_id=call_id, cid=cid, is_pinned=is_pinned):
                answer = Answer(call_id=call_id)
                try:
                    residency.pin(cid, is_pinned=is_pinned)
                    residency.poll()
                except LoramuxError as error:
                    answer = Answer(call_id=call_id, error=describe_error(error))
                self._channel.send(answer)
            case Prewarm(cids=cids, num_busiest=num_busiest):
                known = [adapter.cid for adapter in self._engine.catalog.known()]
                busiest = [] if self._usage is None else self._usage.busiest(known, num_busiest)
                residency.prewarm([*cids, *busiest])
                residency.poll()
            case ListUses(call_id=call_id):
                self._channel.send(Answer(call_id=call_id, uses=adapter_uses(self._engine)))

    def _register(self, call_id: int, path: Path) -> None:
        try:
            known = self._engine.register_adapter(path)
        except Exception as error:  # the caller must hear of it, whatever it is
            self._channel.send(Answer(call_id=call_id, error=describe_error(error)))
        else:
            self._forgotten.discard(known.cid)
            self._channel.send(Answer(call_id=call_id, adapter=self._facts(known)))

    def _verify(self, call_id: int, cid: str) -> None:
        try:
            known = self._engine.catalog.verify(cid)
        except Exception as error:  # the caller must hear of it, whatever it is
            self._channel.send(Answer(call_id=call_id, error=describe_error(error)))
        else:
            self._channel.send(Answer(call_id=call_id, adapter=self._facts(known)))

    def _free_forgotten(self) -> None:
        self._forgotten = {cid for cid in self._forgotten if not self._engine.forget_adapter(cid)}

    def _facts(self, known: KnownAdapter) -> AdapterFacts:
        return AdapterFacts(
            cid=known.cid,
            path=str(known.folder),
            rank=known.max_rank,
            num_bytes=known.num_bytes,
            warnings=known.warnings,
        )


class Pulse:
    """Says from a thread of its own that the process lives, and for how long its step has run."""

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._step_began: float | None = None
        threading.Thread(target=self._beat, daemon=True, name="pulse").start()

    def begin_step(self) -> None:
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        self._step_began = None

    def _beat(self) -> None:
        while True:
            began = self._step_began
            age = 0.0 if began is None else time.monotonic() - began
            try:
                self._channel.send(Heartbeat(step_age_s=age))
            except OSError:
                # The server is gone; the step loop learns it from its own end of file.
                return
            time.sleep(_HEARTBEAT_S)


def serve(connection: socket.socket) -> int:
    channel = EngineChannel(connection)
    start = channel.receive()
    if not isinstance(start, Start):
        return 1
    pulse = Pulse(channel)
    try:
        config = EngineConfig(**start.settings)

        def report(what: str, share: float) -> None:
            channel.send(Progress(what=what, share=share))

        model = load_base(Path(start.model), config, progress=report)
        engine = build_engine(model, config, progress=report)
        channel.send(_ready(model, engine, start.model))
    except (LoramuxError, OSError, MemoryError) as error:
        with contextlib.suppress(ConnectionError):  # the server itself may be what is gone
            channel.send(Failed(error=describe_error(error)))
        return 1
    try:
        usage = None if config.disk_folder is None else UsageFile(Path(config.disk_folder))
        Worker(engine, channel, pulse, usage).run()
    except ConnectionError:
        # The server went away while we were answering.
        return 1
    return 0


def _ready(model: LoadedModel, engine: Engine, path: str) -> Ready:
    return Ready(
        name=model.name,
        path=path,
        folder=str(model.tokenizer_folder),
        digest=model.digest,
        max_model_len=engine.scheduler.config.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=model.eos_token_ids,
        dtype=str(engine.executor.dtype).removeprefix("torch."),
        pool_bytes=engine.executor.pool_bytes,
        block_tokens=engine.scheduler.config.block_tokens,
        shapes=base_info(model.config, model.name),
        max_loras=engine.scheduler.config.max_loras,
    )


if __name__ == "__main__":
    # The server decides when to stop; a Ctrl-C in its terminal must not reach the engine first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = serve(socket.socket(fileno=int(sys.argv[1])))
    # Daemon threads may still hold the socket; there is nothing left to clean up.
    os._exit(status)
