"""Counters of the tiers behind the adapter store, and of receipts that were not stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.backend.host import StoreTierStats

# Name, help text, field of StoreTierStats.
COUNTERS = (
    ("hits", "Files that this tier had.", "hits"),
    ("misses", "Files that this tier did not have, or could not return.", "misses"),
    ("failures", "Reads and writes of this tier that failed.", "failures"),
)


class StoreCollector(Collector):
    """Reads the counters of the store's tiers at each scrape."""

    def __init__(self, tier_stats: Callable[[], Iterable[StoreTierStats]]) -> None:
        self._tier_stats = tier_stats

    def collect(self) -> Iterator[Metric]:
        tiers = list(self._tier_stats())
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(f"loramux:store_tier_{name}", text, labels=["tier"])
            for tier in tiers:
                counter.add_metric([tier.tier], getattr(tier, field))
            yield counter


class ReceiptCollector(Collector):
    """Reads the number of lost receipts at each scrape."""

    def __init__(self, num_dropped: Callable[[], int]) -> None:
        self._num_dropped = num_dropped

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "loramux:receipts_dropped",
            "Receipts that were not stored: the queue was full, or the registry refused them.",
            value=self._num_dropped(),
        )
