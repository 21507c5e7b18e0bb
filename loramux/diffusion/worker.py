"""The process of an image engine: `python -m loramux.diffusion.worker FD` runs the step loop."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import diffusers
import transformers

from loramux.backend.host import AdapterUse
from loramux.backend.images import ImageAdapterCard, ImageCard
from loramux.diffusion.catalog import ReadAdapter
from loramux.diffusion.digest import pipeline_digest
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.events import ImageEvent
from loramux.diffusion.memory import MemoryOptions
from loramux.diffusion.messages import Command, Draw, Report, StartImages
from loramux.diffusion.options import ImageEngineOptions
from loramux.diffusion.pipeline import load_pipeline
from loramux.diffusion.source import fit_source
from loramux.diffusion.stats import adapter_uses, engine_stats
from loramux.diffusion.updates import UpdateSender
from loramux.errors import LoramuxError
from loramux.memory.usage import UsageFile
from loramux.models.folder import model_name
from loramux.runner.device_choice import choose_device
from loramux.worker.channel import EngineChannel
from loramux.worker.messages import (
    Abort,
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
from loramux.worker.step_loop import StepLoop, registration_of, run_process, serve_engine

_log = logging.getLogger(__name__)
_NUM_READERS = 2
_NUM_LOADERS = 2


@dataclass(frozen=True, slots=True)
class Fitted:
    """A request whose source image has been decoded and scaled."""

    draw: Draw


class ImageWorker(StepLoop[ImageEvent, ImageAdapterCard]):
    """The step loop of an image engine."""

    def __init__(
        self,
        engine: ImageEngine,
        channel: EngineChannel,
        pulse: Pulse,
        usage: UsageFile | None = None,
    ) -> None:
        memory = engine.memory
        super().__init__(engine, memory.residency, memory.placement, channel, pulse, usage)
        self._engine = engine
        self._updates = UpdateSender(channel.send)
        # Adapters are read and checked on other threads, so that the step loop goes on.
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="read")
        # Requests whose source images are being decoded there.
        self._fitting: set[str] = set()

    def run(self) -> None:
        super().run()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._updates.stop()

    def _server_is_gone(self) -> None:
        # A step may take minutes.
        os._exit(1)

    def _send_events(self, events: list[ImageEvent]) -> None:
        for event in events:
            self._updates.put(event)
        if self._is_report_due:
            self._send_stats([])

    def _report(self, events: list[ImageEvent]) -> Report:
        return Report(stats=engine_stats(self._engine), residency=self._residency_update())

    def _handle(self, item: Command | ReadAdapter | Fitted) -> None:
        match item:
            case Draw(request=request) if request.source is None:
                self._draw(item)
            case Draw(request=request):
                self._fitting.add(request.request_id)
                self._readers.submit(self._fit, item)
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
                self._engine.admit(item)
            case Register() | RegisterMany() | Verify() | Examine():
                self._start_reading(item)

    def _draw(self, draw: Draw) -> None:
        request_id = draw.request.request_id
        try:
            self._engine.add(draw.request)
        except Exception as error:  # The client waits for an answer, whatever it is.
            self._channel.send(Refused(request_id=request_id, error=encode_error(error)))
        else:
            self._updates.open(request_id, draw.form)

    def _fit(self, draw: Draw) -> None:
        """Decode a source image on a thread, so that the step loop goes on."""
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
        """Start a command that reads files on a thread, which sends the answer."""
        catalog = self._engine.memory.catalog

        def fill(answer: Answer[ImageAdapterCard]) -> None:
            match command:
                case Register(path=path):
                    found = self._register(Path(path))
                    answer.adapter = found.card
                    # The answer does not wait for the disk.
                    self._readers.submit(self._engine.memory.write_disk, found)
                case RegisterMany(paths=paths):
                    answer.registrations = [registration_of(self._store, p) for p in paths]
                case Verify(cid=cid):
                    answer.adapter = catalog.verify(cid)
                case Examine(path=path):
                    answer.report = catalog.examine(Path(path))

        self._answer_from(self._readers, command.call_id, fill)

    def _register(self, path: Path) -> ReadAdapter:
        found = self._engine.memory.catalog.identify(path)
        # Before the answer: requests for the adapter follow it in the inbox.
        self._inbox.put(found)
        return found

    def _store(self, path: Path) -> Registration[ImageAdapterCard]:
        """Write one adapter to the disk before the next is read: many would fill the memory."""
        found = self._register(path)
        self._engine.memory.write_disk(found)
        return Registration(adapter=found.card)

    def _known(self) -> Iterable[ImageAdapterCard]:
        return self._engine.memory.catalog.known()

    def _adopt(self, card: ImageAdapterCard) -> None:
        self._engine.adopt(card)

    def _remove(self, cid: str) -> None:
        with contextlib.suppress(LoramuxError):
            self._engine.remove_adapter(cid)

    def _uses(self) -> list[AdapterUse]:
        return adapter_uses(self._engine)


def serve(connection: socket.socket, pulse: Pulse) -> int:
    """Serve the server at the other end of the socket; return the exit status."""
    return serve_engine(connection, pulse, Command, StartImages, open_loop)


def open_loop(
    start: StartImages, channel: EngineChannel, pulse: Pulse
) -> tuple[ImageCard, ImageWorker]:
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
    options = ImageEngineOptions.from_wire(start.options)
    channel.send(Progress(what="Loading the image model", share=0.0))
    engine, card = open_engine(options)
    usage = None if options.disk_folder is None else UsageFile(options.disk_folder)
    return card, ImageWorker(engine, channel, pulse, usage)


def open_engine(options: ImageEngineOptions) -> tuple[ImageEngine, ImageCard]:
    began = time.monotonic()
    choice = choose_device(options.device)
    if choice.reason is not None:
        _log.warning("The image model is on the CPU, not on the GPU: %s", choice.reason)
    pipe = load_pipeline(
        options.model, dtype=options.dtype, device=choice.device, files=options.files
    )
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
        name=options.served_name or model_name(options.model),
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
        weighs_words=family.weighs_words,
        sizes=family.facts.sizes,
        start_seconds={
            "load": loaded - began,
            "warm-up": warm - loaded,
            "digest": time.monotonic() - warm,
        },
    )
    return engine, card


if __name__ == "__main__":
    run_process(serve)
