"""Traffic by tenant and adapter, for the tenants that see no one else's metrics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from loramux.metrics.traffic import AdapterTraffic, CountedAdapter, Traffic, traffic_metrics

MAX_TENANTS = 10_000


@dataclass(slots=True)
class _Tenant:
    by_cid: AdapterTraffic = field(default_factory=AdapterTraffic)
    by_label: dict[str, CountedAdapter] = field(default_factory=dict)


class TenantTraffic:
    """Counts the traffic of each tenant; the least recently used are forgotten."""

    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def counted(self, tenant: str, cid: str, label: str) -> list[CountedAdapter]:
        found = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        by_label = found.by_label.setdefault(label, CountedAdapter(label, Traffic()))
        return [found.by_cid.counted(cid), by_label]

    def traffic_of(self, tenant: str) -> AdapterTraffic:
        found = self._tenants.get(tenant)
        return AdapterTraffic() if found is None else found.by_cid

    def forget_all_but(self, cids: Iterable[str]) -> None:
        known = list(cids)
        for tenant in self._tenants.values():
            tenant.by_cid.forget_all_but(known)

    def collector(self, tenant: str, model_name: str) -> Collector:
        """Return a collector of the series of one tenant."""
        found = self._tenants.get(tenant, _Tenant())
        return _TenantCollector(found.by_label, model_name)


class _TenantCollector(Collector):
    def __init__(self, counted: dict[str, CountedAdapter], model_name: str) -> None:
        self._counted = counted
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        series = ((label, one.total) for label, one in sorted(self._counted.items()))
        return traffic_metrics(self._model_name, series, "the tenant's adapters")
