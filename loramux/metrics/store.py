"""How often the tiers behind the adapter store had what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.backend import StoreTierStats

# Name, what it says, field of StoreTierStats.
COUNTERS = (
    ("hits", "Files that this tier had.", "hits"),
    ("misses", "Files that it did not have, or could not give.", "misses"),
    ("failures", "Times that it could not be reached, or broke off.", "failures"),
)


class StoreCollector(Collector):
    def __init__(self, find: Callable[[], Iterable[StoreTierStats]]) -> None:
        self._find = find

    def collect(self) -> Iterator[Metric]:
        tiers = list(self._find())
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(f"loramux:store_tier_{name}", text, labels=["tier"])
            for tier in tiers:
                counter.add_metric([tier.tier], getattr(tier, field))
            yield counter
