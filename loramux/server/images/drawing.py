"""Draws the images of one request: limits, metrics and the receipt."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from loramux.backend.images import FinishedImage, ImageForm, ImageUpdate
from loramux.errors import EngineBusy, EngineStopped, RateLimited
from loramux.metrics.traffic import CountedAdapter
from loramux.receipts.receipt import Receipt, ServedImage, ServingStatus
from loramux.server.auth.quotas import Admission
from loramux.server.generate.generation import resubmitting
from loramux.server.generate.receipt_draft import MS_PER_S, ReceiptDraft, refusing
from loramux.server.http.call import Call
from loramux.server.images.context import ImageContext
from loramux.server.images.names import Chosen
from loramux.server.images.sdapi_words import PARAMETERS_KEY, RECEIPT_KEY, TypedWords, infotext
from loramux.server.naming.names import Selected
from loramux.types.caller import Caller
from loramux.types.image import ImageRequest
from loramux.types.request import FinishReason, Selection


class ImageDraft(ReceiptDraft):
    """The receipt of one request for images."""

    num_drawn = 0
    """Tokens of prompts, and image tokens times steps, so far."""
    _images: tuple[ServedImage, ...] = ()
    _finished: tuple[FinishedImage, ...] = ()

    @property
    def num_tokens(self) -> int | None:
        return None if self._is_refused else self.num_drawn

    def add_images(self, requests: Sequence[ImageRequest], images: Sequence[FinishedImage]) -> None:
        self._images = tuple(map(_served, requests, images))
        self._finished = tuple(images)

    def begin_image(self) -> None:
        """Record the first step of the first image."""
        if self._ttft_ms is None:
            self._ttft_ms = self._elapsed_ms()

    def _write(self, status: ServingStatus, error: Exception | None) -> Receipt:
        receipt = super()._write(status, error)
        images = self._finished
        if not images:
            return receipt
        slowest = max(images, key=lambda image: image.load_s)
        return msgspec.structs.replace(
            receipt,
            tier_found=slowest.tier_found,
            cold_miss=slowest.is_cold_miss,
            load_ms=round(slowest.load_s * MS_PER_S, 3),
            queue_depth=max(image.queue_depth for image in images),
            queue_ms=round(max(image.queue_s for image in images) * MS_PER_S, 3),
            prompt_tokens=sum(image.prompt_tokens for image in images),
            completion_tokens=sum(image.image_tokens for image in images),
            distinct_adapters=max(image.max_adapters for image in images),
            images=self._images,
        )


@contextmanager
def image_draft(context: ImageContext, http: Call) -> Iterator[ImageDraft]:
    """Yield the draft of a receipt; an error inside the context is a refusal."""
    issuer = context.receipts
    draft = ImageDraft(issuer, context.base_identity, http.known_caller)
    with refusing(draft, issuer, http):
        yield draft


@dataclass(slots=True, kw_only=True)
class Drawing:
    """One HTTP request with the images that it asks for."""

    context: ImageContext
    caller: Caller
    requests: Sequence[ImageRequest]
    chosen: Chosen
    form: ImageForm
    http: Call | None = None
    """Gets the headers of the answer: the receipt, its adapters and limits."""
    draft: ImageDraft | None = None
    """The receipt; None: one is made here."""
    typed: TypedWords | None = None
    """The prompts in A1111's syntax, if the client wrote it."""
    on_update: Callable[[ImageUpdate], None] | None = None
    """Called with each update of each image."""
    images: list[FinishedImage] = field(default_factory=list)

    def __post_init__(self) -> None:
        context, chosen = self.context, Selected("", self.chosen)
        if self.draft is None:
            self.draft = ImageDraft(context.receipts, context.base_identity, self.caller)
        self.draft.add_adapters(chosen)
        shares = {
            "tenant_share": context.tenant_share(self.caller),
            "adapter_share": context.adapter_share(chosen),
        }
        self.requests = [msgspec.structs.replace(one, **shares) for one in self.requests]
        if self.http is not None:
            if context.receipts.is_on:
                self.http.facts.receipt_id = self.draft.id
            tier_of = context.backend.residency.tier_of
            # Empty for the base, so that routers learn that the name means it.
            found = [(cid, tier_of(cid)) for cid, _ in self.requests[0].selection]
            self.http.facts.tiers = found

    async def draw(self) -> list[FinishedImage]:
        """Draws all images together; if one fails, the others are ended."""
        with self._running():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._draw_one(one)) for one in self.requests]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
            self._finish([task.result() for task in tasks])
        return self.images

    async def updates(self) -> AsyncGenerator[ImageUpdate, None]:
        """Yield the updates of a single image; the receipt is there before the last one."""
        (request,) = self.requests
        with self._running():
            async with aclosing(self._run(request)) as updates:
                async for update in updates:
                    if update.finished is not None:
                        self._finish([update.finished])
                    yield update

    @property
    def warnings(self) -> list[str]:
        """The warnings of the finished images, each once."""
        return list(dict.fromkeys(text for image in self.images for text in image.warnings))

    def infotext(self, request: ImageRequest) -> str:
        """Return A1111's description of an image."""
        context = self.context
        card, model = context.backend.card, context.names.base_names[0]
        return infotext(card, model, request, self.chosen, self.typed)

    def receipt(self) -> Receipt | None:
        """Return the receipt of the finished images; None if receipts are off."""
        assert self.draft is not None
        return self.draft.receipt

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Charges the images on the limits of the caller, and issues the receipt at the end."""
        draft, admission = self._draft, self._admission()
        try:
            if admission is not None:
                admission.begin(sum(self._tokens(one) * one.steps for one in self.requests))
            yield
        except (EngineBusy, RateLimited) as error:
            draft.end(ServingStatus.REFUSED, error)
            raise
        except Exception as error:
            draft.end(ServingStatus.FAILED, error)
            raise
        finally:
            draft.end(ServingStatus.ABORTED)
            if admission is not None:
                admission.end(draft.num_tokens)

    @property
    def _draft(self) -> ImageDraft:
        assert self.draft is not None
        return self.draft

    def _admission(self) -> Admission | None:
        context, caller = self.context, self.caller
        admission = context.quotas.open(context.tenant_of(caller), caller.key_id)
        if self.http is not None and admission is not None:
            self.http.facts.limits = admission.headers
        return admission

    def _finish(self, images: list[FinishedImage]) -> None:
        self.images = images
        self._draft.add_images(self.requests, images)
        self._draft.num_drawn = sum(one.prompt_tokens + one.image_tokens for one in images)
        self._draft.end(ServingStatus.COMPLETED)

    async def _draw_one(self, request: ImageRequest) -> FinishedImage:
        async with aclosing(self._run(request)) as updates:
            async for update in updates:
                if update.finished is not None:
                    return update.finished
        raise EngineStopped("The image engine ended the image without a result.")

    async def _run(self, request: ImageRequest) -> AsyncGenerator[ImageUpdate, None]:
        """Yield the updates of one image, and count it in the metrics."""
        backend, names, metrics = self.context.backend, self.context.names, self.context.metrics
        counted = self._counted()
        began_s = last_s = time.monotonic()
        tokens, continued = self._tokens(request), 0
        outcome = FinishReason.ABORT
        form = self._form(request)
        submitted = resubmitting(lambda: backend.submit(request, form), names, request.selection)
        try:
            async with aclosing(submitted) as updates:
                async for update in updates:
                    self._draft.begin_image()
                    if self.on_update is not None:
                        self.on_update(update)
                    now_s = time.monotonic()
                    if update.finished is None:
                        metrics.step(now_s - last_s, is_first=not continued)
                        last_s = now_s
                        self._draft.num_drawn += tokens
                        continued += tokens
                        for one in counted:
                            one.add(generation_tokens=tokens)
                    else:
                        outcome, image = FinishReason.STOP, update.finished
                        prompt_tokens, image_tokens = image.prompt_tokens, image.image_tokens
                        metrics.answered(image.num_steps)
                        metrics.finished(
                            now_s - began_s,
                            prompt_tokens=prompt_tokens,
                            image_tokens=image_tokens,
                        )
                        rest = image_tokens - continued
                        for one in counted:
                            one.add(prompt_tokens=prompt_tokens, generation_tokens=rest)
                    yield update
        except Exception:
            outcome = FinishReason.ERROR
            raise
        finally:
            metrics.ended(outcome)

    def _form(self, request: ImageRequest) -> ImageForm:
        texts = [(PARAMETERS_KEY, self.infotext(request))]
        if self.context.receipts.is_on:
            texts.append((RECEIPT_KEY, self._draft.id))
        return replace(self.form, texts=tuple(texts))

    def _counted(self) -> list[CountedAdapter]:
        """Return the counters of the adapters that change the image, with this image counted."""
        metrics, tenant = self.context.metrics, self.caller.confined_to
        used = Selected("", self.chosen).used
        found = [one for named in used for one in metrics.counted(named.cid, named.label, tenant)]
        for one in found:
            one.add(requests=1)
        for named in used:
            metrics.asked.add(named.cid, named.text)
        return found

    def _tokens(self, request: ImageRequest) -> int:
        """Image tokens of one step."""
        factor = self.context.backend.card.size_factor
        return max(1, (request.width // factor) * (request.height // factor))


async def draw_smallest(context: ImageContext, selection: Selection) -> None:
    """Draws one step of the smallest image with the adapters, which are on the device then."""
    width, height = context.backend.card.smallest_size
    request = ImageRequest(
        request_id=f"warm-{uuid.uuid4().hex}",
        prompt="warm",
        width=width,
        height=height,
        steps=1,
        seed=0,
        selection=selection,
    )
    backend, form = context.backend, ImageForm()
    submitted = resubmitting(lambda: backend.submit(request, form), context.names, selection)
    async with aclosing(submitted) as updates:
        async for _ in updates:
            pass


def _served(request: ImageRequest, image: FinishedImage) -> ServedImage:
    return ServedImage(
        seed=request.seed,
        size=f"{request.width}x{request.height}",
        steps=request.steps,
        pixel_digest=image.digest,
        num_pauses=image.num_pauses,
    )
