"""The engine of an image model in a process of its own; this module needs no torch."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sized
from dataclasses import replace

from loramux.backend.images import (
    ImageAdapterCard,
    ImageCard,
    ImageForm,
    ImageStats,
    ImageUpdate,
)
from loramux.diffusion.messages import Draw, Drawn, Reply, Report, StartImages
from loramux.diffusion.options import ImageEngineOptions
from loramux.errors import EngineBusy, EngineStopped, LoramuxError
from loramux.types.image import ImageRequest
from loramux.worker.hosted import HostedEngine
from loramux.worker.messages import Abort, Message, Refused, decode_error
from loramux.worker.process import EngineKind, OnProgress
from loramux.worker.spawn import SpawnedWorker

IMAGE_ENGINE = "loramux.diffusion.worker"
# On a CPU, a step of a large model with its decoder takes minutes.
IMAGES = EngineKind(IMAGE_ENGINE, Reply, step_limit_s=1800.0)
_log = logging.getLogger(__name__)


class AsyncImageEngine(HostedEngine[ImageCard, ImageAdapterCard, ImageStats]):
    """Implements loramux.backend.images.ImageBackend over an engine in another process."""

    kind = IMAGES
    no_stats = ImageStats()

    def __init__(
        self,
        options: ImageEngineOptions,
        *,
        on_progress: OnProgress = lambda what, share: None,
        worker: SpawnedWorker | None = None,
    ) -> None:
        """`worker`: a process that was spawned before, for the first engine."""
        super().__init__(on_progress=on_progress, worker=worker)
        self._options = options
        self._streams: dict[str, asyncio.Queue[ImageUpdate | LoramuxError]] = {}

    async def submit(self, request: ImageRequest, form: ImageForm) -> AsyncIterator[ImageUpdate]:
        request_id = request.request_id
        stream = self._open_stream(request)
        has_ended = False
        self._send(Draw(request=request, form=form))
        try:
            while not has_ended:
                found = await stream.get()
                has_ended = isinstance(found, LoramuxError) or found.finished is not None
                if isinstance(found, LoramuxError):
                    raise found
                yield found
        finally:
            if self._streams.pop(request_id, None) is not None and not has_ended:
                self._send(Abort(request_id=request_id))

    def _open_stream(self, request: ImageRequest) -> asyncio.Queue[ImageUpdate | LoramuxError]:
        self._require_ready()
        if len(self._streams) >= self._options.max_open:
            raise EngineBusy(f"{len(self._streams)} images are open, and no more are taken now.")
        if request.request_id in self._streams:
            raise LoramuxError(f"Request id {request.request_id!r} is in use.")
        self._use_adapters(request.cids)
        stream = self._streams[request.request_id] = asyncio.Queue()
        return stream

    def _start_message(self, first: ImageCard | None) -> StartImages:
        options = self._options
        if first is not None:
            # A restarted engine must not change to another device.
            options = replace(options, device=first.device)
        return StartImages(options=options.to_wire())

    def _described(self, card: ImageCard, first: ImageCard | None) -> ImageCard:
        return card

    @property
    def _open_requests(self) -> Sized:
        return self._streams

    def _fail_streams(self, error: EngineStopped) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
        self._streams.clear()

    def _handle(self, reply: Message) -> None:
        match reply:
            case Drawn(request_id=request_id, update=update):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.put_nowait(update)
            case Refused(request_id=request_id, error=error):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.put_nowait(decode_error(error))
            case Report(stats=stats, residency=residency):
                self._stats.update(stats, residency)
            case _:
                _log.warning("unexpected message from the engine: %s", type(reply).__name__)

    async def _probe_selection(self, cid: str | None) -> None:
        width, height = self.card.smallest_size
        request = ImageRequest(
            request_id=f"probe-{secrets.token_hex(8)}",
            prompt="probe",
            width=width,
            height=height,
            steps=1,
            seed=0,
            selection=() if cid is None else ((cid, 1.0),),
        )
        async for _ in self.submit(request, ImageForm()):
            pass
