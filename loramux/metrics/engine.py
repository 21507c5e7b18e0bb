"""Metrics of the engine, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, islice

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loramux.backend.host import AdapterHost, EngineStats, Health, TierStats
from loramux.metrics.gateway import AskedNames, gateway_metrics

# Limit of the names of one adapter: many tenants may have pushed the same bytes.
MAX_LABELS = 4
# Name, help text, field of TierStats.
TIER_COUNTERS = (
    ("hits", "Requests that found their adapter in this tier, and in no faster one.", "hits"),
    ("misses", "Requests whose adapter was in a slower tier.", "misses"),
    ("loads", "Adapters loaded into this tier.", "loads"),
    ("evictions", "Adapters evicted from this tier.", "evictions"),
    ("load_seconds", "Duration of loads into this tier.", "load_seconds"),
    ("load_bytes", "Bytes loaded into this tier.", "load_bytes"),
    ("load_failures", "Loads into this tier that failed.", "failures"),
)
TIER_GAUGES = (
    ("bytes", "Bytes of adapters in this tier.", "used_bytes"),
    ("budget_bytes", "Memory budget of this tier.", "budget_bytes"),
    ("adapters", "Adapters in this tier.", "num_adapters"),
)


class EngineCollector(Collector):
    """Reads the engine's stats; its counters restart at 0 with the engine."""

    def __init__(
        self,
        backend: AdapterHost,
        model_name: Callable[[], str],
        labels_of: Callable[[str], Iterable[str]],
        asked: AskedNames,
        max_resident: Callable[[], int] | None,
    ) -> None:
        """`max_resident`: None leaves out the metrics for inference gateways."""
        self._asked = asked
        self._max_resident = max_resident
        self._backend = backend
        self._labels_of = labels_of
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats, name = self._backend.stats, self._model_name()
        for title, text, value in _gauges(stats, self._backend.health):
            gauge = GaugeMetricFamily(title, text, labels=["model_name"])
            gauge.add_metric([name], value)
            yield gauge
        for title, text, total in _counters(stats, self._backend.num_restarts):
            counter = CounterMetricFamily(title, text, labels=["model_name"])
            counter.add_metric([name], total)
            yield counter
        yield _kills(self._backend.kills, name)
        names = _names_by_cid(self._backend, self._labels_of)
        if self._max_resident is not None:
            yield from gateway_metrics(
                self._backend, names, self._asked, max_resident=self._max_resident()
            )
        yield _resident(stats, names)
        yield from _drafts(stats, names)
        yield from _tier_metrics(stats.tiers, name)
        yield _step_loss(stats, name)


def _gauges(stats: EngineStats, health: Health) -> list[tuple[str, str, float]]:
    num_used = stats.num_pages - stats.num_free_pages
    num_busy = num_used - stats.num_idle_pages
    return [
        ("vllm:num_requests_running", "Sequences in the batch.", stats.num_running),
        ("vllm:num_requests_waiting", "Sequences in the queue.", stats.num_waiting),
        (
            "vllm:kv_cache_usage_perc",
            "Fraction of the pages in use by running sequences and their adapters; 1 is full.",
            num_busy / stats.num_pages if stats.num_pages else 0.0,
        ),
        (
            "vllm:gpu_cache_usage_perc",
            "The older name of vllm:kv_cache_usage_perc.",
            num_busy / stats.num_pages if stats.num_pages else 0.0,
        ),
        ("loramux:pages_used", "Pages of KV cache and adapters, idle ones included.", num_used),
        ("loramux:pages", "All pages of the pool.", stats.num_pages),
        ("loramux:engine_ready", "1 while the engine accepts requests.", health is Health.READY),
    ]


def _counters(stats: EngineStats, num_restarts: int) -> list[tuple[str, str, int]]:
    return [
        ("vllm:num_preemptions", "Sequences that were preempted.", stats.num_preemptions),
        ("loramux:adapter_loads", "Adapters loaded into the page pool.", stats.num_adapter_loads),
        (
            "loramux:adapter_evictions",
            "Adapters evicted from the page pool.",
            stats.num_adapter_evictions,
        ),
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_query_tokens,
        ),
        (
            "vllm:prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            stats.prefix_hit_tokens,
        ),
        (
            "vllm:gpu_prefix_cache_queries",
            "The older name of vllm:prefix_cache_queries.",
            stats.prefix_query_tokens,
        ),
        (
            "vllm:gpu_prefix_cache_hits",
            "The older name of vllm:prefix_cache_hits.",
            stats.prefix_hit_tokens,
        ),
        (
            "vllm:spec_decode_num_draft_tokens",
            "Drafts that were verified.",
            sum(stats.draft_tokens.values()),
        ),
        (
            "vllm:spec_decode_num_accepted_tokens",
            "Drafts that the model sampled too.",
            sum(stats.accepted_draft_tokens.values()),
        ),
        ("loramux:engine_steps", "Batches computed.", stats.num_steps),
        ("loramux:engine_restarts", "Restarts after the engine died or hung.", num_restarts),
    ]


def _kills(kills: Mapping[str, int], model_name: str) -> Metric:
    counter = CounterMetricFamily(
        "loramux:engine_kills",
        "Engine processes that the server killed.",
        labels=["model_name", "cause"],
    )
    for cause, number in kills.items():
        counter.add_metric([model_name, cause], number)
    return counter


def _resident(stats: EngineStats, names: Mapping[str, list[str]]) -> Metric:
    resident = GaugeMetricFamily(
        "loramux:adapter_resident",
        "1 if the adapter's weights are in the page pool.",
        labels=["adapter"],
    )
    for cid in stats.resident_adapters:
        for name in names.get(cid, ()):
            resident.add_metric([name], 1)
    return resident


def _drafts(stats: EngineStats, names: Mapping[str, list[str]]) -> Iterator[Metric]:
    for title, text, numbers in (
        ("draft_tokens", "Verified drafts of an adapter's requests.", stats.draft_tokens),
        (
            "accepted_draft_tokens",
            "Drafts of an adapter's requests that the model sampled too.",
            stats.accepted_draft_tokens,
        ),
    ):
        counter = CounterMetricFamily(f"loramux:adapter_{title}", text, labels=["adapter"])
        for cid, number in numbers.items():
            for name in names.get(cid, ()):
                counter.add_metric([name], number)
        yield counter


def _tier_metrics(tiers: Iterable[TierStats], model_name: str) -> Iterator[Metric]:
    labels = ["model_name", "tier"]
    counters = [
        CounterMetricFamily(f"loramux:tier_{n}", t, labels=labels) for n, t, _ in TIER_COUNTERS
    ]
    gauges = [GaugeMetricFamily(f"loramux:tier_{n}", t, labels=labels) for n, t, _ in TIER_GAUGES]
    for tier in tiers:
        for counter, (_, _, field) in zip(counters, TIER_COUNTERS, strict=True):
            counter.add_metric([model_name, tier.tier], getattr(tier, field))
        for gauge, (_, _, field) in zip(gauges, TIER_GAUGES, strict=True):
            gauge.add_metric([model_name, tier.tier], getattr(tier, field))
    yield from counters
    yield from gauges


def _step_loss(stats: EngineStats, model_name: str) -> Metric:
    histogram = HistogramMetricFamily(
        "loramux:step_load_loss_seconds",
        "Time that adapter loads added to a step, for steps with a load.",
        labels=["model_name"],
    )
    if stats.step_loss_s:
        buckets = list(zip(stats.step_loss_s, accumulate(stats.step_loss_s.values()), strict=True))
        histogram.add_metric([model_name], buckets, sum_value=stats.step_loss_sum_s)
    return histogram


def _names_by_cid(
    backend: AdapterHost, labels_of: Callable[[str], Iterable[str]]
) -> dict[str, list[str]]:
    return {cid: list(islice(labels_of(cid), MAX_LABELS)) for cid in list(backend.adapters)}
