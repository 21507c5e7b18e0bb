"""Metrics of an image model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.backend.images import ImageBackend
from loramux.metrics.server import HostMetrics
from loramux.types.request import FinishReason

IMAGE_BUCKETS = (0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 7.5, 10, 15, 20, 30, 60, 120, 240, 480)
FORWARD_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class ImageMetrics(HostMetrics):
    """Metrics of an image model, and those of its engine, which are read at each scrape."""

    def __init__(
        self,
        backend: ImageBackend,
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
        self._steps = self._counter("loramux:denoise_steps", "Denoising steps of all images.")
        self._prompt_tokens = self._counter(
            "loramux:image_prompt_tokens", "Tokens of the prompts of images."
        )
        self._image_tokens = self._counter(
            "loramux:image_tokens", "Image tokens times steps, over all rows."
        )
        self.registry.register(ForwardCollector(backend, lambda: self.model_name))

    def step(self, seconds: float, *, is_first: bool) -> None:
        """Count a step; `seconds` since the last one, or since the arrival."""
        self._steps.labels(self.model_name).inc()
        (self.newest_first_token if is_first else self.newest_inter_token).add(seconds)

    def finished(self, seconds: float, *, prompt_tokens: int, image_tokens: int) -> None:
        self._seconds.labels(self.model_name).observe(seconds)
        self._prompt_tokens.labels(self.model_name).inc(prompt_tokens)
        self._image_tokens.labels(self.model_name).inc(image_tokens)
        self.total.num_prompt_tokens += prompt_tokens
        self.total.num_generation_tokens += image_tokens

    def ended(self, reason: FinishReason) -> None:
        self._images.labels(self.model_name, reason.value).inc()
        self.total.num_requests += 1


class ForwardCollector(Collector):
    """Reads what the forwards of the denoiser had; the counts restart at 0 with the engine."""

    def __init__(self, backend: ImageBackend, model_name: Callable[[], str]) -> None:
        self._backend = backend
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats, name = self._backend.stats, self._model_name()
        yield _histogram(
            "loramux:rows_per_forward",
            "Rows of each forward of the denoiser; an image with guidance may have two.",
            name,
            stats.rows_per_forward,
        )
        yield _histogram(
            "loramux:distinct_adapters_per_forward",
            "Distinct adapters of each forward of the denoiser.",
            name,
            stats.adapters_per_forward,
        )
        paused = GaugeMetricFamily(
            "loramux:paused_jobs",
            "Images that have begun and did not take part in the last forward.",
            labels=["model_name"],
        )
        paused.add_metric([name], stats.num_paused)
        yield paused


def _histogram(title: str, text: str, name: str, counts: Mapping[int, int]) -> Metric:
    """Return the histogram of exact counts: value -> how often."""
    each = [0] * (len(FORWARD_BUCKETS) + 1)
    for value, number in counts.items():
        fitting = (i for i, bound in enumerate(FORWARD_BUCKETS) if value <= bound)
        each[next(fitting, len(FORWARD_BUCKETS))] += number
    bounds = [*map(str, FORWARD_BUCKETS), "+Inf"]
    histogram = HistogramMetricFamily(title, text, labels=["model_name"])
    total = sum(value * number for value, number in counts.items())
    buckets = list(zip(bounds, accumulate(each), strict=True))
    histogram.add_metric([name], buckets, sum_value=total)
    return histogram
