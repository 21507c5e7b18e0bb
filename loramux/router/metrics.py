"""Prometheus metrics of a router; they are its own, never sums of the replicas' metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.router.fleet import STALE_S, Fleet, Replica, State

_CHOICE_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005)


class RouterMetrics:
    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "loramux_router:answers",
            "Answers by replica and by the slowest tier in which their adapters were found.",
            ["replica", "tier"],
            registry=self.registry,
        )
        self._retries = Counter(
            "loramux_router:retries",
            "Requests that went to another replica.",
            registry=self.registry,
        )
        self._unbudgeted = Counter(
            "loramux_router:retries_over_budget",
            "Requests that were not tried again because the budget of retries was spent.",
            registry=self.registry,
        )
        self._failures = Counter(
            "loramux_router:replica_failures",
            "Connections that failed or were lost.",
            ["replica"],
            registry=self.registry,
        )
        self._lost = Counter(
            "loramux_router:lost_streams",
            "Streams that ended with an error event because their replica was lost.",
            ["replica"],
            registry=self.registry,
        )
        self._choice = Histogram(
            "loramux_router:choice_seconds",
            "Time to choose a replica.",
            buckets=_CHOICE_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_FleetCollector(fleet))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def chosen(self, seconds: float) -> None:
        self._choice.observe(seconds)

    def answered(self, replica: Replica, tier: str) -> None:
        self._answers.labels(replica.name, tier).inc()

    def retried(self) -> None:
        self._retries.inc()

    def unbudgeted(self) -> None:
        self._unbudgeted.inc()

    def failed(self, replica: Replica) -> None:
        self._failures.labels(replica.name).inc()

    def lost(self, replica: Replica) -> None:
        self._lost.labels(replica.name).inc()


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        now = time.monotonic()
        told = (
            ("ready", "1 while the replica takes requests.", _is_ready),
            ("open", "Open sequences: reported ones, and this router's requests.", _load),
            ("ejected", "1 while the replica is left out after faults in a row.", _is_ejected),
            ("lacking", "Adapters that it should have and does not.", _num_lacking),
            ("stale", f"1 if the newest report is older than {STALE_S:g} s.", _is_stale),
            ("adapters", "Adapters in memory or on disk.", _num_adapters),
        )
        for title, text, value in told:
            gauge = GaugeMetricFamily(f"loramux_router:replica_{title}", text, labels=["replica"])
            for replica in self._fleet.replicas.values():
                gauge.add_metric([replica.name], value(replica, now))
            yield gauge


def _is_ready(replica: Replica, now: float) -> float:
    return replica.state is State.READY


def _is_ejected(replica: Replica, now: float) -> float:
    return replica.conduct.is_out(now)


def _num_lacking(replica: Replica, now: float) -> float:
    return len(replica.lacking)


def _load(replica: Replica, now: float) -> float:
    return replica.load


def _is_stale(replica: Replica, now: float) -> float:
    return now - replica.reported_s > STALE_S


def _num_adapters(replica: Replica, now: float) -> float:
    return len(replica.tiers)
