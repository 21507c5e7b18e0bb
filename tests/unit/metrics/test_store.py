from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from loramux.backend import StoreTierStats
from loramux.metrics.store import StoreCollector


def test_each_tier_has_its_counts_and_none_is_no_fault() -> None:
    tiers = [StoreTierStats(tier="shared_cache", hits=3, misses=2, failures=1)]
    registry = CollectorRegistry()
    registry.register(StoreCollector(lambda: tiers))
    scraped = generate_latest(registry).decode()
    for name, value in (("hits", 3.0), ("misses", 2.0), ("failures", 1.0)):
        assert f'loramux:store_tier_{name}_total{{tier="shared_cache"}} {value}' in scraped
    tiers.clear()
    assert "# TYPE loramux:store_tier_hits_total counter" in generate_latest(registry).decode()
