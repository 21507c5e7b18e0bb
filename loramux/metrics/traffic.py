"""Traffic by adapter: exact for all of them, and as metrics for the busiest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.backend.host import AdapterHost

NUM_SHOWN = 20
OTHER = "other"
# Half-life of the traffic in the ranking.
HALF_LIFE_S = 600.0
# Hysteresis: an adapter replaces a shown one only if it is this much busier.
HYSTERESIS = 1.2


@dataclass(slots=True)
class Traffic:
    """Counters of requests and tokens."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generation_tokens


@dataclass(slots=True)
class CountedAdapter:
    """Traffic of one adapter."""

    name: str
    shown_in: Traffic
    """The series to which its traffic is added: its own, or that of all others."""
    total: Traffic = field(default_factory=Traffic)
    own: Traffic = field(default_factory=Traffic)
    """Its own series: the traffic while it was among the busiest."""
    score: float = 0.0
    scored_tokens: int = 0

    @property
    def is_shown(self) -> bool:
        return self.shown_in is self.own

    def add(self, *, requests: int = 0, prompt_tokens: int = 0, generation_tokens: int = 0) -> None:
        for traffic in (self.total, self.shown_in):
            traffic.num_requests += requests
            traffic.num_prompt_tokens += prompt_tokens
            traffic.num_generation_tokens += generation_tokens


class AdapterTraffic:
    """Counts traffic; each request stays in one series, so that no counter ever decreases."""

    def __init__(
        self, *, num_shown: int = NUM_SHOWN, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_shown = num_shown
        self._clock = clock
        self._counted: dict[str, CountedAdapter] = {}
        self._other = Traffic()
        self._ranked_s = clock()

    def counted(self, name: str) -> CountedAdapter:
        """Return the counters of an adapter, to be incremented while its requests run."""
        found = self._counted.get(name)
        if found is None:
            found = self._counted[name] = CountedAdapter(name, self._other)
            num_shown = sum(adapter.is_shown for adapter in self._counted.values())
            if name != OTHER and num_shown < self._num_shown:
                found.shown_in = found.own
        return found

    def total(self, name: str) -> Traffic:
        found = self._counted.get(name)
        return Traffic() if found is None else found.total

    def busiest(self) -> list[str]:
        """Names of the adapters with traffic, busiest first."""
        self._score()
        ranked = sorted(self._counted.values(), key=lambda adapter: adapter.score, reverse=True)
        return [adapter.name for adapter in ranked]

    def series(self, known: Iterable[str]) -> Iterator[tuple[str, Traffic]]:
        """Series of the busiest of the known adapters, and one series of all others."""
        self._score()
        self.forget_all_but(known)
        ranked = sorted(
            (adapter for name, adapter in self._counted.items() if name != OTHER),
            key=lambda adapter: adapter.score * (HYSTERESIS if adapter.is_shown else 1.0),
            reverse=True,
        )
        for rank, adapter in enumerate(ranked):
            adapter.shown_in = adapter.own if rank < self._num_shown else self._other
            if adapter.is_shown:
                yield adapter.name, adapter.own
        yield OTHER, self._other

    def forget_all_but(self, known: Iterable[str]) -> None:
        kept = set(known)
        self._counted = {name: one for name, one in self._counted.items() if name in kept}

    def _score(self) -> None:
        now = self._clock()
        decay = 0.5 ** ((now - self._ranked_s) / HALF_LIFE_S)
        self._ranked_s = now
        for adapter in self._counted.values():
            num_new = adapter.total.num_tokens - adapter.scored_tokens
            adapter.score = adapter.score * decay + num_new
            adapter.scored_tokens += num_new


class TrafficCollector(Collector):
    """Reads the traffic at each scrape."""

    def __init__(
        self,
        traffic: AdapterTraffic,
        backend: AdapterHost,
        model_name: Callable[[], str],
        labels_of: Callable[[str], Iterable[str]],
    ) -> None:
        self._traffic = traffic
        self._labels_of = labels_of
        self._backend = backend
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        known = [label for cid in list(self._backend.adapters) for label in self._labels_of(cid)]
        series = self._traffic.series(known)
        yield from traffic_metrics(self._model_name(), series, "the busiest adapters")


def traffic_metrics(
    model_name: str, series: Iterable[tuple[str, Traffic]], whose: str
) -> Iterator[Metric]:
    """Yield the counters of adapters: requests, prompt tokens, and generated tokens."""
    labels = ["model_name", "adapter"]
    requests = CounterMetricFamily(
        "loramux:adapter_requests", f"Requests for {whose}.", labels=labels
    )
    prompts = CounterMetricFamily(
        "loramux:adapter_prompt_tokens", f"Prompt tokens of {whose}.", labels=labels
    )
    answers = CounterMetricFamily(
        "loramux:adapter_generation_tokens", f"Generated tokens of {whose}.", labels=labels
    )
    for name, traffic in series:
        values = [model_name, name]
        requests.add_metric(values, traffic.num_requests)
        prompts.add_metric(values, traffic.num_prompt_tokens)
        answers.add_metric(values, traffic.num_generation_tokens)
    yield from (requests, prompts, answers)
