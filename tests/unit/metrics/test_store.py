from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from loramux.backend.host import StoreTierStats
from loramux.metrics.store import ReceiptCollector, StoreCollector


def test_every_tier_has_its_counters_and_there_may_be_no_tier() -> None:
    tiers = [StoreTierStats(tier="shared_cache", hits=3, misses=2, failures=1)]
    registry = CollectorRegistry()
    registry.register(StoreCollector(lambda: tiers))
    scraped = generate_latest(registry).decode()
    for name, value in (("hits", 3.0), ("misses", 2.0), ("failures", 1.0)):
        assert f'loramux:store_tier_{name}_total{{tier="shared_cache"}} {value}' in scraped
    tiers.clear()
    assert "# TYPE loramux:store_tier_hits_total counter" in generate_latest(registry).decode()


def test_dropped_receipts_are_counted() -> None:
    registry = CollectorRegistry()
    registry.register(ReceiptCollector(lambda: 3))
    assert "loramux:receipts_dropped_total 3.0" in generate_latest(registry).decode()
