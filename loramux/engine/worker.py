"""The engine process: `python -m loramux.engine.worker FD` runs the step loop."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from loramux.adapters.catalog import IdentifiedAdapter
from loramux.backend.host import AdapterUse
from loramux.backend.text import ModelCard
from loramux.config.engine import EngineConfig, ResolvedConfig
from loramux.engine.build import build_engine, load_base
from loramux.engine.engine import Engine
from loramux.engine.gc_control import FullCollections
from loramux.engine.messages import Add, Command, Events, Finish, Identify, ListPages, Start
from loramux.engine.start_phases import StartPhases
from loramux.engine.stats import adapter_uses, engine_stats
from loramux.errors import LoramuxError
from loramux.kernels.compile_ahead import CompileAhead, are_compiled, has_numba
from loramux.memory.loader import lower_priority
from loramux.memory.usage import UsageFile
from loramux.models.loader import LoadedModel
from loramux.runner.device_choice import DeviceChoice, resolve_config
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.request import TokenEvent
from loramux.worker.channel import EngineChannel
from loramux.worker.messages import (
    Abort,
    Adopt,
    Answer,
    Examine,
    Progress,
    Refused,
    Register,
    RegisterMany,
    Registration,
    Verify,
    encode_error,
)
from loramux.worker.pulse import Pulse
from loramux.worker.step_loop import Moved, StepLoop, registration_of, run_process, serve_engine

_SAVE_USAGE_INTERVAL_S = 60.0
_NUM_HEADER_READERS = 4
# Adapters that are identified at once: steps on a CPU use the same cores.
_NUM_IDENTIFIERS = {"cpu": 2, "cuda": 4}


class Worker(StepLoop[TokenEvent, AdapterCard]):
    """The step loop of a language model's engine."""

    def __init__(
        self,
        engine: Engine,
        channel: EngineChannel,
        pulse: Pulse,
        usage: UsageFile | None = None,
        ahead: CompileAhead | None = None,
    ) -> None:
        super().__init__(engine, engine.residency, engine.memory.placement, channel, pulse, usage)
        self._engine = engine
        self._collections = FullCollections(owns_process=True)
        self._usage_saved_s = time.monotonic()
        # Adapters are read and checked on other threads, so that the step loop goes on.
        self._header_readers = _threads("headers", _NUM_HEADER_READERS)
        self._identifiers = _threads("identify", _NUM_IDENTIFIERS[engine.memory.rank.device.type])
        # Removed by the server, but still used by a sequence.
        self._removed: set[str] = set()
        self._num_steps = 0
        self._ahead = ahead

    def run(self) -> None:
        if self._ahead is not None:
            self._ahead.start(lambda: self._inbox.put(Moved()))
        with self._collections:
            super().run()
        if self._ahead is not None:
            self._ahead.close()
        for threads in (self._header_readers, self._identifiers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    def _send_events(self, events: list[TokenEvent]) -> None:
        """Send the events, with statistics if they are due or the engine becomes idle."""
        self._num_steps += 1
        self._free_removed()
        if self._is_report_due or (events and not self._engine.has_work):
            self._send_stats(events)
        elif events:
            self._channel.send(Events(events=events))
        if time.monotonic() - self._usage_saved_s > _SAVE_USAGE_INTERVAL_S:
            self._usage_saved_s = time.monotonic()
            self._save_usage()
        self._collections.after_step()

    def _report(self, events: list[TokenEvent]) -> Events:
        stats = engine_stats(self._engine, num_steps=self._num_steps)
        return Events(events=events, stats=stats, residency=self._residency_update())

    def _work_while_idle(self) -> bool:
        self._collections.while_idle()
        return self._engine.prepare_next()

    def _handle(self, item: Command | IdentifiedAdapter) -> None:
        match item:
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
            case IdentifiedAdapter(card=card):
                self._removed.discard(card.cid)
                self._engine.memory.admit(item)
            case ListPages(call_id=call_id):
                self._channel.send(Answer(call_id=call_id, pages=self._engine.pages.kinds()))
            case Register() | RegisterMany() | Identify() | Verify() | Examine():
                self._start_reading(item)

    def _start_reading(
        self, command: Register | RegisterMany | Identify | Verify | Examine
    ) -> None:
        """Start a command that reads files on a thread, which sends the answer."""

        def fill(answer: Answer[AdapterCard]) -> None:
            match command:
                case Register(path=path, check="header"):
                    card = self._inspect(Path(path))
                    answer.adapter, answer.inspected = card.adapter, card.inspected
                case RegisterMany(paths=paths, check="header"):
                    answer.registrations = [registration_of(self._inspect, p) for p in paths]
                case Register(path=path) | Identify(path=path):
                    found = self._identify(Path(path))
                    answer.adapter = found.card
                    # The answer does not wait for the disk.
                    self._identifiers.submit(self._engine.memory.write_disk, found)
                case RegisterMany(paths=paths):
                    answer.registrations = [registration_of(self._store, p) for p in paths]
                case Verify(cid=cid):
                    answer.adapter = self._engine.catalog.verify(cid)
                case Examine(path=path):
                    answer.report = self._engine.catalog.examine(Path(path)).to_dict()

        is_header = isinstance(command, Register | RegisterMany) and command.check == "header"
        threads = self._header_readers if is_header else self._identifiers
        self._answer_from(threads, command.call_id, fill)

    def _inspect(self, path: Path) -> Registration[AdapterCard]:
        card = self._engine.catalog.inspect(path)
        if isinstance(card, InspectedCard):
            return Registration(inspected=card)
        # Before the answer: requests for the adapter follow it in the inbox.
        self._inbox.put(Adopt(card=card))
        return Registration(adapter=card)

    def _identify(self, path: Path) -> IdentifiedAdapter:
        found = self._engine.memory.identify(path)
        # Before the answer: requests for the adapter follow it in the inbox.
        self._inbox.put(found)
        return found

    def _store(self, path: Path) -> Registration[AdapterCard]:
        """Write one adapter to the disk before the next is read: many would fill the memory."""
        found = self._identify(path)
        self._engine.memory.write_disk(found)
        return Registration(adapter=found.card)

    def _known(self) -> Iterable[AdapterCard]:
        return self._engine.catalog.known()

    def _adopt(self, card: AdapterCard) -> None:
        self._removed.discard(card.cid)
        self._engine.catalog.adopt(card)

    def _remove(self, cid: str) -> None:
        self._removed.add(cid)
        self._free_removed()

    def _uses(self) -> list[AdapterUse]:
        return adapter_uses(self._engine)

    def _free_removed(self) -> None:
        self._removed = {cid for cid in self._removed if not self._engine.forget_adapter(cid)}


def _threads(name: str, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        max_workers=num_threads, thread_name_prefix=name, initializer=lower_priority
    )


def serve(connection: socket.socket, pulse: Pulse) -> int:
    """Serve the server at the other end of the socket; return the exit status."""
    return serve_engine(connection, pulse, Command, Start, open_loop)


def open_loop(start: Start, channel: EngineChannel, pulse: Pulse) -> tuple[ModelCard, Worker]:
    """Build the engine, and say how far it is."""
    config, choice = resolve_config(EngineConfig(**start.settings))
    phases = StartPhases(lambda what, share: channel.send(Progress(what=what, share=share)))
    ahead = CompileAhead() if _compiles_ahead(config) else None
    model = load_base(Path(start.model), config, progress=phases, packs_later=ahead is not None)
    if model.decoder.dtype != torch.float32:
        ahead = None
    engine = build_engine(model, config, progress=phases, ahead=ahead)
    engine.constraints.use_tokenizer(model.tokenizer_folder, model.eos_token_ids)
    engine.constraints.prepare()
    card = _model_card(model, engine, start.model, config, choice)
    card = replace(card, compiles_kernels=ahead is not None)
    usage = None if config.disk_folder is None else UsageFile(Path(config.disk_folder))
    worker = Worker(engine, channel, pulse, usage, ahead)
    return replace(card, start_seconds=phases.seconds()), worker


def _compiles_ahead(config: ResolvedConfig) -> bool:
    """Whether the first requests should not wait for the compiler."""
    is_on_cpu = not (config.is_gpu or config.wants_device_kernels or config.wants_reference_kernels)
    return is_on_cpu and config.may_compile_kernels and has_numba() and not are_compiled()


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
        kv_cache_dtype=engine.executor.kv.dtype,
        shapes=engine.catalog.base,
        packing="paged" if config.wants_device_kernels else "dense",
        kept_formats=model.decoder.kept_formats,
        pooling=engine.pooling,
        max_loras=engine.scheduler.config.max_loras,
        host_memory_bytes=config.host_memory_bytes,
        disk_space_bytes=0 if config.disk_folder is None else config.disk_space_bytes,
        adapter_memory_fraction=config.adapter_memory_fraction,
    )


if __name__ == "__main__":
    run_process(serve)
