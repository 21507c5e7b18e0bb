"""Metrics of several engines in one text: a family has one heading and the series of all."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class MergedCollector(Collector):
    """Collects from several collectors; their series differ in the label `model_name`."""

    def __init__(self, *collectors: Collector) -> None:
        self._collectors = list(collectors)

    def add(self, collector: Collector) -> None:
        self._collectors.append(collector)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()
