"""Prometheus metrics of a server; the vllm: names are those that routers and dashboards use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from loramux.backend.host import AdapterHost, Health
from loramux.metrics.engine import EngineCollector
from loramux.metrics.gateway import AskedNames
from loramux.metrics.merged import MergedCollector
from loramux.metrics.tenants import TenantTraffic
from loramux.metrics.traffic import AdapterTraffic, CountedAdapter, Traffic, TrafficCollector
from loramux.types.replica_report import USUAL_ANSWER_TOKENS
from loramux.types.request import FinishReason

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 2.5, 5, 10, 40, 80),
)
WHOLE_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 2.5, 5, 10, 20, 30, 60, 120, 240, 480, 960, 1920)


MAX_SAMPLES = 1000
# Weight of the newest answer in the smoothed length.
_NEWEST_ANSWER = 1 / 32


class NewestSamples:
    """The newest latencies since they were last taken, in seconds."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=MAX_SAMPLES)
        self.add = self._kept.append

    def take(self) -> list[float]:
        """Return the samples in ascending order, and forget them."""
        taken = sorted(self._kept)
        self._kept.clear()
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSeries:
    """Series with the model's label, looked up once."""

    first_token: Histogram
    inter_token: Histogram
    whole: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter


class HostMetrics:
    """Metrics that every backend has: of its engine, and the traffic of its adapters."""

    def __init__(
        self,
        backend: AdapterHost,
        *,
        model_name: str | None = None,
        labels_of: Callable[[str], Sequence[str]] = lambda cid: (cid,),
        max_resident: Callable[[], int] | None = None,
        beside: HostMetrics | None = None,
    ) -> None:
        """`labels_of`: returns the labels of the adapter with a CID.

        `max_resident`: returns how many adapters of the usual size fit on the device; None: the
        engine has no metrics for inference gateways. `beside`: another backend of this server.
        """
        self.asked = AskedNames()
        """The names by which requests asked for adapters."""
        self._backend = backend
        self._model_name = model_name
        self.traffic = AdapterTraffic()
        """Traffic by CID."""
        self._labelled_traffic = AdapterTraffic()
        self.tenants = TenantTraffic()
        """Traffic of the tenants whose callers see nothing else."""
        self.total = Traffic()
        self.newest_first_token = NewestSamples()
        """Seconds to the first token; to the first step of an image."""
        self.newest_inter_token = NewestSamples()
        """Seconds between two deltas; of a step of an image."""
        self.answer_tokens = USUAL_ANSWER_TOKENS
        """Smoothed length of an answer; of an image: its steps."""
        if beside is None:
            self.registry = CollectorRegistry()
            self._engines = MergedCollector()
            self.registry.register(self._engines)
            self._hosts: list[HostMetrics] = []
        else:
            self.registry, self._engines, self._hosts = (
                beside.registry,
                beside._engines,
                beside._hosts,
            )
        self._hosts.append(self)
        self._engines.add(
            EngineCollector(backend, lambda: self.model_name, labels_of, self.asked, max_resident)
        )
        self._engines.add(
            TrafficCollector(self._labelled_traffic, backend, lambda: self.model_name, labels_of)
        )

    @property
    def model_name(self) -> str:
        """Name of the base model; empty until the engine has started."""
        if self._model_name is None and self._backend.health is not Health.STARTING:
            self._model_name = self._backend.card.name
        return self._model_name or ""

    def render(self) -> bytes:
        """Render the series of all backends of the server."""
        for host in self._hosts:
            host.forget_removed()
        return generate_latest(self.registry)

    def forget_removed(self) -> None:
        """Forgets the adapters that the engine no longer has."""
        known = list(self._backend.adapters)
        self.traffic.forget_all_but(known)
        self.tenants.forget_all_but(known)
        self.asked.forget_all_but(self._backend.adapters)

    def answered(self, num_tokens: float) -> None:
        """Count the length of one answer; of an image: its steps."""
        self.answer_tokens += (num_tokens - self.answer_tokens) * _NEWEST_ANSWER

    def counted(self, cid: str, label: str, tenant: str | None = None) -> list[CountedAdapter]:
        """Return the counters of an adapter's traffic, by CID and by label.

        `tenant`: also those of a tenant, which sees no others.
        """
        own = [] if tenant is None else self.tenants.counted(tenant, cid, label)
        return [self.traffic.counted(cid), self._labelled_traffic.counted(label), *own]

    def traffic_of(self, tenant: str | None) -> AdapterTraffic:
        """Return the traffic by CID, of one tenant if it is given."""
        return self.traffic if tenant is None else self.tenants.traffic_of(tenant)

    def render_tenant(self, tenant: str) -> bytes:
        """Render the series of one tenant."""
        parts = [host.tenants.collector(tenant, host.model_name) for host in self._hosts]
        registry = CollectorRegistry()
        registry.register(MergedCollector(*parts))
        return generate_latest(registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)


class Metrics(HostMetrics):
    """Metrics of a language model, and those of its engine, which are read at each scrape."""

    def __init__(
        self,
        backend: AdapterHost,
        *,
        model_name: str | None = None,
        labels_of: Callable[[str], Sequence[str]] = lambda cid: (cid,),
        max_resident: Callable[[], int] = lambda: 1,
    ) -> None:
        super().__init__(
            backend, model_name=model_name, labels_of=labels_of, max_resident=max_resident
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from arrival to the first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two deltas of a choice.",
            INTER_TOKEN_BUCKETS,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from arrival to the end.",
            WHOLE_REQUEST_BUCKETS,
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter(
            "vllm:request_success", "Finished requests by finish reason.", "finished_reason"
        )

    def first_token(self, seconds: float, *, num_prompt_tokens: int) -> None:
        self._labelled.first_token.observe(seconds)
        self.newest_first_token.add(seconds)
        self._labelled.prompt_tokens.inc(num_prompt_tokens)
        self.total.num_prompt_tokens += num_prompt_tokens

    def inter_token(self, seconds: float) -> None:
        self._labelled.inter_token.observe(seconds)
        self.newest_inter_token.add(seconds)

    def generated(self, num_tokens: int) -> None:
        self._labelled.generation_tokens.inc(num_tokens)
        self.total.num_generation_tokens += num_tokens

    def ended(self, seconds: float, reason: FinishReason) -> None:
        self._labelled.whole.observe(seconds)
        self.total.num_requests += 1
        self._success.labels(self.model_name, reason.value).inc()

    @cached_property
    def _labelled(self) -> LabelledSeries:
        """The series, looked up by the first request: labels() costs more than an increment."""
        name = self.model_name
        return LabelledSeries(
            first_token=self._first_token.labels(name),
            inter_token=self._inter_token.labels(name),
            whole=self._whole.labels(name),
            prompt_tokens=self._prompt_tokens.labels(name),
            generation_tokens=self._generation_tokens.labels(name),
        )
