"""What a server counts, in Prometheus' terms; routers and dashboards scrape the vllm: names."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.backend import Backend, EngineStats, Health
from loramux.types import FinishReason

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 2.5, 5, 10, 40, 80),
)
WHOLE_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 2.5, 5, 10, 20, 30, 60, 120, 240, 480, 960, 1920)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSeries:
    first_token: Histogram
    inter_token: Histogram
    whole: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter


class Metrics:
    """Counters of one server, and its engine's figures read at each scrape."""

    def __init__(self, backend: Backend, *, model_name: str | None = None) -> None:
        self._backend = backend
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between two deltas of a choice.",
            INTER_TOKEN_BUCKETS,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", WHOLE_REQUEST_BUCKETS
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter(
            "vllm:request_success", "Ended requests, by how they ended.", "finished_reason"
        )
        self.registry.register(EngineCollector(backend, self))

    @property
    def model_name(self) -> str:
        """The base's name; empty until the engine has told it."""
        if self._model_name is None and self._backend.health is not Health.STARTING:
            self._model_name = self._backend.card.name
        return self._model_name or ""

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def first_token(self, seconds: float, *, num_prompt_tokens: int) -> None:
        self._labelled.first_token.observe(seconds)
        self._labelled.prompt_tokens.inc(num_prompt_tokens)

    def inter_token(self, seconds: float) -> None:
        self._labelled.inter_token.observe(seconds)

    def generated(self, num_tokens: int) -> None:
        self._labelled.generation_tokens.inc(num_tokens)

    def ended(self, seconds: float, reason: FinishReason) -> None:
        self._labelled.whole.observe(seconds)
        self._success.labels(self.model_name, reason.value).inc()

    @cached_property
    def _labelled(self) -> LabelledSeries:
        """Looked up once, by the first request: labels() costs more than the counting itself."""
        name = self.model_name
        return LabelledSeries(
            first_token=self._first_token.labels(name),
            inter_token=self._inter_token.labels(name),
            whole=self._whole.labels(name),
            prompt_tokens=self._prompt_tokens.labels(name),
            generation_tokens=self._generation_tokens.labels(name),
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)


class EngineCollector(Collector):
    """The engine's own figures. Its counters start again at 0 when the engine does."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats, name = self._backend.stats, self._metrics.model_name
        for title, text, value in _gauges(stats, self._backend.health):
            gauge = GaugeMetricFamily(title, text, labels=["model_name"])
            gauge.add_metric([name], value)
            yield gauge
        for title, text, total in _counters(stats, self._backend.num_restarts):
            counter = CounterMetricFamily(title, text, labels=["model_name"])
            counter.add_metric([name], total)
            yield counter
        names = _names_by_cid(self._backend)
        yield _lora_requests_info(stats, names, num_adapters=len(self._backend.adapters))
        yield _resident(stats, names)


def _gauges(stats: EngineStats, health: Health) -> list[tuple[str, str, float]]:
    num_used = stats.num_pages - stats.num_free_pages
    return [
        ("vllm:num_requests_running", "Sequences in the batch.", stats.num_running),
        ("vllm:num_requests_waiting", "Sequences in the queue.", stats.num_waiting),
        (
            "vllm:kv_cache_usage_perc",
            "Used part of the pages that KV cache and adapters share; 1 is full.",
            num_used / stats.num_pages if stats.num_pages else 0.0,
        ),
        ("loramux:pages_used", "Pages in use by KV cache and adapters.", num_used),
        ("loramux:pages", "All pages of the pool.", stats.num_pages),
        ("loramux:engine_ready", "1 while the engine can answer.", health is Health.READY),
    ]


def _counters(stats: EngineStats, num_restarts: int) -> list[tuple[str, str, int]]:
    return [
        ("vllm:num_preemptions", "Sequences that had to give pages back.", stats.num_preemptions),
        ("loramux:adapter_loads", "Adapters copied into pages.", stats.num_adapter_loads),
        ("loramux:adapter_evictions", "Adapters dropped from pages.", stats.num_adapter_evictions),
        ("loramux:engine_steps", "Batches computed.", stats.num_steps),
        ("loramux:engine_restarts", "Engines that died or hung.", num_restarts),
    ]


def _lora_requests_info(
    stats: EngineStats, names: Mapping[str, list[str]], *, num_adapters: int
) -> Metric:
    """One sample whose labels are the lists; routers take the newest by its value, a time."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and of waiting requests.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    running = _joined(stats.running_adapters, names)
    waiting = _joined(stats.waiting_adapters, names)
    # The pool has no fixed number of slots: any known adapter may share the batch.
    info.add_metric([str(num_adapters), running, waiting], time.time())
    return info


def _resident(stats: EngineStats, names: Mapping[str, list[str]]) -> Metric:
    resident = GaugeMetricFamily(
        "loramux:adapter_resident", "1: the adapter's weights are in pages.", labels=["adapter"]
    )
    for cid in stats.resident_adapters:
        for name in names.get(cid, ()):
            resident.add_metric([name], 1)
    return resident


def _names_by_cid(backend: Backend) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for card in backend.adapters.values():
        names.setdefault(card.cid, []).append(card.name)
    return names


def _joined(cids: Iterable[str], names: Mapping[str, list[str]]) -> str:
    return ",".join(name for cid in cids for name in names.get(cid, ()))
