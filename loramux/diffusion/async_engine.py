"""Runs an ImageEngine in a thread of its own, behind an asynchronous interface."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from loramux.backend import AdapterUse, Health
from loramux.config.engine import EvictionName
from loramux.config.images import ADAPTER_MEMORY_BYTES
from loramux.diffusion.digest import pipeline_digest, pixel_digest, to_bytes
from loramux.diffusion.encode import encode_image
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.events import ImageEvent, ImageFacts
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.diffusion.lora_files.reader import read_adapter
from loramux.diffusion.pipeline import load_pipeline
from loramux.diffusion.planner import PlanLimits
from loramux.diffusion.source import fit_source
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    EngineBusy,
    EngineStopped,
    LoramuxError,
)
from loramux.image_backend import (
    FinishedImage,
    ImageAdapterCard,
    ImageCard,
    ImageForm,
    ImageStats,
    ImageUpdate,
)
from loramux.threads import WorkThreads
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.image import MIN_SIDE, ImageRequest
from loramux.types.residency import ResidencyView, Tier

T = TypeVar("T")
MAX_OPEN = 256
_ENCODING = WorkThreads("image encodings", 2)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEngineOptions:
    model: Path
    served_name: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    limits: PlanLimits = PlanLimits()
    max_open: int = MAX_OPEN
    """Images that run or wait; more are refused."""
    adapter_memory_bytes: int = ADAPTER_MEMORY_BYTES
    """Memory of the device for adapters; one that is larger is refused."""
    host_memory_bytes: int | Literal["auto"] = "auto"
    """Host memory for packed adapters."""
    disk_folder: Path | None = None
    """Folder of packed adapters on disk; None: they are read from their files again."""
    disk_space_bytes: int = 0
    eviction: EvictionName = "cost"


class AsyncImageEngine:
    """An ImageBackend whose denoiser runs in a thread of this process.

    All calls of the engine happen in that thread: they are queued, and run between two steps.
    """

    def __init__(self, options: ImageEngineOptions) -> None:
        self._options = options
        self._health = Health.STARTING
        self._condition = threading.Condition()
        self._calls: deque[Callable[[ImageEngine], None]] = deque()
        self._streams: dict[str, asyncio.Queue[ImageEvent | LoramuxError]] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        """Calls that the thread has not answered."""
        self._adapters: dict[str, ImageAdapterCard] = {}
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._card: ImageCard | None = None
        self._names: PipelineNames | None = None
        self._pinned: set[str] = set()
        self._engine: ImageEngine | None = None
        self.residency = ResidencyView()
        self.num_restarts = 0

    @property
    def health(self) -> Health:
        return self._health

    @property
    def card(self) -> ImageCard:
        assert self._card is not None, "start() first"
        return self._card

    @property
    def adapters(self) -> Mapping[str, ImageAdapterCard]:
        return self._adapters

    @property
    def pinned(self) -> Set[str]:
        return self._pinned

    @property
    def stats(self) -> ImageStats:
        engine = self._engine
        if engine is None:
            return ImageStats()
        return ImageStats(
            num_running=len(self._streams),
            num_steps=engine.num_forwards,
            resident_adapters=tuple(self.residency.resident),
            num_paused=engine.num_paused,
            rows_per_forward=dict(engine.forwards.rows),
            adapters_per_forward=dict(engine.forwards.adapters),
        )

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="image engine", daemon=True
        )
        self._thread.start()
        await started
        self._health = Health.READY

    async def add_adapter(self, path: str) -> ImageAdapterCard:
        def add(engine: ImageEngine) -> ImageAdapterCard:
            assert self._names is not None
            adapter, report = read_adapter(Path(path), self._names)
            engine.add_adapter(adapter)
            return ImageAdapterCard(
                cid=report.cid,
                path=str(report.path),
                rank=adapter.rank,
                num_bytes=adapter.num_bytes,
                num_modules=report.num_modules,
                file_bytes=report.num_bytes,
                formats=report.formats,
                method=report.method,
                trigger_words=report.trigger_words,
            )

        card = await self._call(add)
        self._adapters[card.cid] = card
        self.residency.apply([(card.cid, Tier.DEVICE)])
        return card

    async def inspect_adapters(
        self, paths: Sequence[str]
    ) -> list[AdapterCard | InspectedCard | LoramuxError]:
        found: list[AdapterCard | InspectedCard | LoramuxError] = []
        for path in paths:
            try:
                found.append(await self.add_adapter(path))
            except LoramuxError as error:
                found.append(error)
        return found

    async def prewarm(self, cids: Sequence[str], *, num_busiest: int = 0) -> None:
        """Does nothing: all adapters are on the device."""

    async def pin_adapter(self, cid: str, pinned: bool) -> None:
        if cid not in self._adapters:
            raise AdapterNotFound(f"No adapter {cid} is registered.")
        (self._pinned.add if pinned else self._pinned.discard)(cid)

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        return [
            AdapterUse(
                cid=card.cid,
                tier="device",
                num_bytes=card.num_bytes,
                rank=card.rank,
                is_pinned=card.cid in self._pinned,
            )
            for card in self._adapters.values()
        ]

    async def examine_adapter(self, path: str) -> Mapping[str, Any]:
        def examine(engine: ImageEngine) -> dict[str, Any]:
            assert self._names is not None
            try:
                _, report = read_adapter(Path(path), self._names)
            except AdapterRefused as error:
                return {"refusal": {"code": error.code, "reason": error.reason, "fix": error.fix}}
            return asdict(report) | {"path": str(report.path), "refusal": None}

        return await self._call(examine)

    async def probe(self, timeout_s: float) -> dict[str, float]:
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            side = self.card.size_factor * -(-MIN_SIDE // self.card.size_factor)
            request = ImageRequest(
                request_id=f"probe-{secrets.token_hex(8)}",
                prompt="probe",
                width=side,
                height=side,
                steps=1,
                seed=0,
            )
            async for _ in self.submit(request, ImageForm()):
                pass
        return {"generate_s": time.monotonic() - began}

    async def remove_adapter(self, cid: str) -> None:
        if self._adapters.pop(cid, None) is None:
            raise AdapterNotFound(f"No adapter {cid} is registered.")
        self._pinned.discard(cid)
        self.residency.apply([(cid, Tier.GONE)])
        await self._call(lambda engine: engine.remove_adapter(cid))

    async def submit(self, request: ImageRequest, form: ImageForm) -> AsyncIterator[ImageUpdate]:
        self._require_ready()
        if len(self._streams) >= self._options.max_open:
            raise EngineBusy(f"{len(self._streams)} images are open, and no more are taken now.")
        request_id = request.request_id
        if request_id in self._streams:
            raise LoramuxError(f"Request id {request_id!r} is in use.")
        stream = self._streams[request_id] = asyncio.Queue()
        try:
            request = await _ENCODING.run(fit_source, request)
            await self._call(lambda engine: engine.add(request))
            while True:
                event = await stream.get()
                if isinstance(event, LoramuxError):
                    raise event
                if event.error is not None:
                    raise event.error
                yield await _ENCODING.run(_update, event, form)
                if event.facts is not None:
                    return
        finally:
            del self._streams[request_id]
            # Does nothing to an image that has ended.
            self._post(lambda engine: engine.abort(request_id))

    async def close(self, *, drain_s: float) -> None:
        if self._health is Health.STOPPED:
            return
        self._health = Health.DRAINING
        deadline = time.monotonic() + drain_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._health = Health.STOPPED
        self._fail_all(EngineStopped("The server is shutting down."))
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread is not None:
            await _ENCODING.run(self._thread.join)

    def _require_ready(self) -> None:
        if self._health is not Health.READY:
            raise EngineStopped(f"The image engine is {self._health.value}.")

    async def _call(self, work: Callable[[ImageEngine], T]) -> T:
        """Runs the work in the engine's thread, between two steps."""
        self._require_ready()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run(engine: ImageEngine) -> None:
            try:
                result = work(engine)
            except Exception as error:
                loop.call_soon_threadsafe(_set_exception, future, error)
            else:
                loop.call_soon_threadsafe(_set_result, future, result)

        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._post(run)
        return await future

    def _post(self, call: Callable[[ImageEngine], None]) -> None:
        with self._condition:
            self._calls.append(call)
            self._condition.notify()

    # In the engine's thread.

    def _run(self, started: asyncio.Future[None]) -> None:
        assert self._loop is not None
        try:
            engine = self._engine = self._open()
        except Exception as error:
            self._loop.call_soon_threadsafe(_set_exception, started, error)
            return
        self._loop.call_soon_threadsafe(_set_result, started, None)
        try:
            while (calls := self._next_calls(engine)) is not None:
                for call in calls:
                    call(engine)
                events = engine.step()
                if events:
                    self._loop.call_soon_threadsafe(self._deliver, events)
        except Exception as error:
            _log.exception("the image engine failed")
            message = f"The image engine failed: {error!r}."
            self._loop.call_soon_threadsafe(self._die, message)

    def _next_calls(self, engine: ImageEngine) -> list[Callable[[ImageEngine], None]] | None:
        """Waits for calls if no image runs; returns None at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._calls or self._is_stopping or engine.has_work)
            if self._is_stopping:
                return None
            calls = list(self._calls)
            self._calls.clear()
            return calls

    def _open(self) -> ImageEngine:
        options = self._options
        pipe = load_pipeline(options.model, dtype=options.dtype, device=options.device)
        engine = ImageEngine(pipe, options.limits)
        family = engine.family
        self._names = PipelineNames(pipe, family.denoiser, family.text_encoders)
        self._card = ImageCard(
            name=options.served_name or options.model.resolve().name,
            path=str(options.model),
            digest=pipeline_digest(pipe),
            pool_bytes=options.adapter_memory_bytes,
            max_sequences=options.limits.max_images,
            family=family.name,
            dtype=str(family.dtype).removeprefix("torch."),
            device=str(family.device),
            default_size=family.default_size,
            size_factor=family.size_factor,
            default_steps=family.default_steps,
            max_tokens=options.limits.max_tokens,
            takes_guidance=family.takes_guidance,
            takes_true_cfg=family.guidance_name == "true_cfg_scale",
            samplers=engine.samplers.names,
        )
        return engine

    # In the event loop.

    def _deliver(self, events: list[ImageEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put_nowait(event)

    def _die(self, message: str) -> None:
        self._health = Health.STOPPED
        self._fail_all(EngineStopped(message))

    def _fail_all(self, error: EngineStopped) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
        for future in list(self._pending):
            _set_exception(future, error)


def _update(event: ImageEvent, form: ImageForm) -> ImageUpdate:
    """Encodes what an event carries."""
    partial = None if event.preview is None else encode_image(to_bytes(event.preview), form)
    finished = None
    if event.pixels is not None and event.facts is not None:
        finished = _finished(event.pixels, event.facts, form)
    return ImageUpdate(
        step=event.step, num_steps=event.num_steps, partial=partial, finished=finished
    )


def _finished(pixels: Tensor, facts: ImageFacts, form: ImageForm) -> FinishedImage:
    image = to_bytes(pixels)
    return FinishedImage(
        data=encode_image(image, form),
        digest=pixel_digest(image),
        num_steps=facts.num_steps,
        prompt_tokens=facts.prompt_tokens,
        image_tokens=facts.image_tokens,
        queue_s=facts.queue_s,
        denoise_s=facts.denoise_s,
        decode_s=facts.decode_s,
        num_pauses=facts.num_pauses,
        max_images=facts.max_images,
        max_adapters=facts.max_adapters,
    )


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
