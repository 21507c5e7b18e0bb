"""Encodes the pictures of events on threads, and sends the events of each image in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from loramux.backend.images import FinishedImage, ImageForm, ImageUpdate
from loramux.diffusion.digest import pixel_digest, to_bytes
from loramux.diffusion.encode import encode_image
from loramux.diffusion.events import ImageEvent, ImageFacts
from loramux.diffusion.messages import Drawn
from loramux.worker.messages import Message, Refused, encode_error

_NUM_THREADS = 2


class UpdateSender:
    """Events without a picture are sent at once, unless an earlier one of the image is encoded."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        """Any thread may call `send`."""
        self._send = send
        self._forms: dict[str, ImageForm] = {}
        self._queues: dict[str, deque[ImageEvent]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="encode")

    def open(self, request_id: str, form: ImageForm) -> None:
        with self._lock:
            self._forms[request_id] = form

    def close(self, request_id: str) -> None:
        """Drop what is not sent of an image."""
        with self._lock:
            self._forms.pop(request_id, None)

    def put(self, event: ImageEvent) -> None:
        has_picture = event.pixels is not None or event.preview is not None
        with self._lock:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.append(event)
                return
            if has_picture:
                self._queues[event.request_id] = deque([event])
        if has_picture:
            self._threads.submit(self._drain, event.request_id)
        else:
            self._deliver(event)

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _drain(self, request_id: str) -> None:
        while True:
            with self._lock:
                queue = self._queues[request_id]
                if not queue:
                    del self._queues[request_id]
                    return
                event = queue.popleft()
            try:
                self._deliver(event)
            except OSError:
                # The server is gone; the step loop learns it as well.
                continue

    def _deliver(self, event: ImageEvent) -> None:
        with self._lock:
            form = self._forms.get(event.request_id)
            if event.is_last:
                self._forms.pop(event.request_id, None)
        if form is None:
            return
        self._send(_message(event, form))


def _message(event: ImageEvent, form: ImageForm) -> Message:
    error: Exception | None = event.error
    if error is None:
        try:
            return Drawn(request_id=event.request_id, update=_update(event, form))
        except Exception as failure:  # The client waits for an end of the image.
            error = failure
    return Refused(request_id=event.request_id, error=encode_error(error))


def _update(event: ImageEvent, form: ImageForm) -> ImageUpdate:
    partial = None
    if event.preview is not None:
        partial = encode_image(to_bytes(event.preview), replace(form, texts=()))
    finished = None
    if event.pixels is not None and event.facts is not None:
        finished = _finished(event.pixels, event.facts, form)
    return ImageUpdate(
        step=event.step, num_steps=event.num_steps, partial=partial, finished=finished
    )


def _finished(pixels: Tensor, facts: ImageFacts, form: ImageForm) -> FinishedImage:
    image = to_bytes(pixels).cpu()
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
        tier_found=facts.tier_found,
        load_s=facts.load_s,
        queue_depth=facts.queue_depth,
        warnings=facts.warnings,
    )
