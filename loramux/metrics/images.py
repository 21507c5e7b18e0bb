"""Metrics of an image model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loramux.backend import AdapterHost
from loramux.metrics.server import HostMetrics
from loramux.types.request import FinishReason

IMAGE_BUCKETS = (0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 7.5, 10, 15, 20, 30, 60, 120, 240, 480)


class ImageMetrics(HostMetrics):
    """Metrics of an image model, and those of its engine, which are read at each scrape."""

    def __init__(
        self,
        backend: AdapterHost,
        *,
        model_name: str | None = None,
        labels_of: Callable[[str], Sequence[str]] = lambda cid: (cid,),
        beside: HostMetrics | None = None,
    ) -> None:
        super().__init__(backend, model_name=model_name, labels_of=labels_of, beside=beside)
        self._seconds = self._histogram(
            "loramux:image_seconds", "Time from arrival to the finished image.", IMAGE_BUCKETS
        )
        self._images = self._counter(
            "loramux:images", "Images by finish reason.", "finished_reason"
        )
        self._prompt_tokens = self._counter(
            "loramux:image_prompt_tokens", "Tokens of the prompts of images."
        )
        self._image_tokens = self._counter(
            "loramux:image_tokens", "Image tokens times steps, over all rows."
        )

    def finished(self, seconds: float, *, prompt_tokens: int, image_tokens: int) -> None:
        self._seconds.labels(self.model_name).observe(seconds)
        self._prompt_tokens.labels(self.model_name).inc(prompt_tokens)
        self._image_tokens.labels(self.model_name).inc(image_tokens)
        self.total.num_prompt_tokens += prompt_tokens
        self.total.num_generation_tokens += image_tokens

    def ended(self, reason: FinishReason) -> None:
        self._images.labels(self.model_name, reason.value).inc()
        self.total.num_requests += 1
