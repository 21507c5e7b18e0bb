"""Draws the images of one request, and issues its receipt."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from msgspec import UNSET
from starlette.requests import HTTPConnection

from loramux.backend import Health
from loramux.errors import EngineStopped
from loramux.image_backend import FinishedImage, ImageBackend, ImageForm, ImageUpdate
from loramux.receipts.receipt import Receipt, ServedAdapter, ServedImage
from loramux.server.caller import Caller
from loramux.server.images.names import Chosen, ImageNames
from loramux.server.receipt_draft import ID_PREFIX, ReceiptIssuer
from loramux.types.image import ImageRequest
from loramux.types.residency import Tier

MS_PER_S = 1000.0
# Weight of the newest image in the smoothed seconds.
_NEWEST_IMAGE = 1 / 8


@dataclass(slots=True)
class ImageLoad:
    """How many images are open, and how long one takes."""

    num_open: int = 0
    image_s: float = 0.0
    """Smoothed seconds of denoising."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def finished(self, image: FinishedImage) -> None:
        self.image_s += (image.denoise_s - self.image_s) * (_NEWEST_IMAGE if self.image_s else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageContext:
    """Shared by all routes for images."""

    backend: ImageBackend
    names: ImageNames
    receipts: ReceiptIssuer = field(default_factory=ReceiptIssuer)
    max_body_bytes: int = 2**20
    load: ImageLoad = field(default_factory=ImageLoad)
    created_s: int = field(default_factory=lambda: int(time.time()))

    def require_ready(self) -> None:
        if self.backend.health is not Health.READY:
            raise EngineStopped(f"The image engine is {self.backend.health.value}: try later.")


@dataclass(slots=True, kw_only=True)
class Drawing:
    """One HTTP request with the images that it asks for."""

    context: ImageContext
    caller: Caller
    requests: Sequence[ImageRequest]
    chosen: Chosen
    form: ImageForm
    images: list[FinishedImage] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)
    _first_step_s: float | None = None

    async def draw(self) -> list[FinishedImage]:
        """Draws all images together; if one fails, the others are ended."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._draw_one(one)) for one in self.requests]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        self.images = [task.result() for task in tasks]
        return self.images

    async def updates(self) -> AsyncGenerator[ImageUpdate, None]:
        """Yields the updates of a single image."""
        (request,) = self.requests
        async with aclosing(_generator(self.context, request, self.form)) as updates:
            async for update in updates:
                self._note(update)
                if update.finished is not None:
                    self.images = [update.finished]
                yield update

    def receipt(self) -> Receipt | None:
        """Issues the receipt of the finished images; None if receipts are off."""
        issuer, card = self.context.receipts, self.context.backend.card
        if not issuer.is_on:
            return None
        used = [one for one in self.chosen if one.weight]
        first_s = self._first_step_s
        now_s = time.monotonic()
        return issuer.issue(
            Receipt(
                id=ID_PREFIX + secrets.token_hex(16),
                time=time.time() - (now_s - self._began_s),
                tenant=self.caller.tenant or issuer.home_tenant,
                api_key_id=UNSET if self.caller.key_id is None else self.caller.key_id,
                base_model=self.context.names.base_names[0],
                base_digest=card.digest,
                adapter_cid=used[0].cid if used else None,
                adapters=tuple(
                    ServedAdapter(cid=one.cid, weight=one.weight, name=one.name)
                    for one in self.chosen
                ),
                pool_id=issuer.pool_id,
                tier_found="device" if used else None,
                cold_miss=False,
                queue_depth=0,
                queue_ms=max(image.queue_s for image in self.images) * MS_PER_S,
                ttft_ms=None if first_s is None else (first_s - self._began_s) * MS_PER_S,
                latency_ms=(now_s - self._began_s) * MS_PER_S,
                prompt_tokens=sum(image.prompt_tokens for image in self.images),
                completion_tokens=sum(image.image_tokens for image in self.images),
                distinct_adapters=max(image.max_adapters for image in self.images),
                images=tuple(map(_served, self.requests, self.images)),
            )
        )

    async def _draw_one(self, request: ImageRequest) -> FinishedImage:
        async with aclosing(_generator(self.context, request, self.form)) as updates:
            async for update in updates:
                self._note(update)
                if update.finished is not None:
                    return update.finished
        raise EngineStopped("The image engine ended the image without a result.")

    def _note(self, update: ImageUpdate) -> None:
        if self._first_step_s is None:
            self._first_step_s = time.monotonic()


async def _generator(
    context: ImageContext, request: ImageRequest, form: ImageForm
) -> AsyncGenerator[ImageUpdate, None]:
    with context.load.opened():
        async for update in context.backend.submit(request, form):
            if update.finished is not None:
                context.load.finished(update.finished)
            yield update


def tell_adapters(http: HTTPConnection, chosen: Chosen) -> None:
    """Puts the adapters into the headers of the answer, for routers."""
    http.state.found_in_tiers = [(one.cid, Tier.DEVICE) for one in chosen if one.weight]


def _served(request: ImageRequest, image: FinishedImage) -> ServedImage:
    return ServedImage(
        seed=request.seed,
        size=f"{request.width}x{request.height}",
        steps=request.steps,
        pixel_digest=image.digest,
        num_pauses=image.num_pauses,
    )
