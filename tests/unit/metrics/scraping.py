"""Reads what Prometheus would read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from loramux.metrics.server import Metrics
from tests.unit.server.scripted_backend import ScriptedBackend

Samples = dict[str, list[tuple[dict[str, str], float]]]


def scraped(backend: ScriptedBackend, metrics: Metrics | None = None) -> Samples:
    text = (metrics or Metrics(backend, labels_of=backend.names.labels_of)).render().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found
