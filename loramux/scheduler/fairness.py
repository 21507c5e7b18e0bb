"""Virtual token counters (VTC) of tenants and, inside a tenant, of adapters.

docs/scheduling.md describes the rules; R2, R3 and R10 to R11 are implemented here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from loramux.errors import InvalidRequest
from loramux.types.request import Request

PROMPT_TOKEN_COST = 1.0
# An output token occupies a slot of the batch for a whole step.
OUTPUT_TOKEN_COST = 2.0
# Maximum lead (R6): how far ahead in its counter a client may be and still be admitted first where
# that keeps the number of adapters in the batch low. Adapters of one tenant: about ten requests.
# Tenants: a short prompt with its answer.
MAX_ADAPTER_LEAD = 8192.0
MAX_TENANT_LEAD = 128.0
MAX_REMEMBERED = 1024
_MIN_COMPACTED = 64


class SharedRequest(Protocol):
    """What fair shares read of a request, whatever it asks for."""

    @property
    def tenant(self) -> str: ...

    @property
    def tenant_share(self) -> float: ...

    @property
    def adapter_share(self) -> float: ...

    @property
    def cids(self) -> tuple[str, ...]: ...


@dataclass(slots=True, eq=False)
class Client:
    """A tenant, or an adapter of a tenant: its virtual token counter and its sequences."""

    counter: float = 0.0
    """Virtual tokens served so far, divided by the share."""
    share: float = 1.0
    num_waiting: int = 0
    num_running: int = 0
    num_protected_slots: int = 0
    """Slots that are not preempted for other clients (R10)."""
    is_active: bool = True
    """Whether a sequence of the client waits or runs."""

    @property
    def is_preemptible(self) -> bool:
        """Returns whether the client runs more than its protected slots and a single sequence."""
        is_above = self.num_running > self.num_protected_slots
        return is_above and self.num_running + self.num_waiting > 1

    def may_preempt(self, other: Client, limit: float) -> bool:
        """R10: returns whether this client is entitled to a slot of the other one.

        Its counter must be below `limit`, and it must have no slot, or with one more at most half
        of what the other keeps, both relative to their shares.
        """
        if self.counter >= limit or not other.is_preemptible:
            return False
        own = (self.num_running + 1) / self.share
        return self.num_running == 0 or 2 * own <= (other.num_running - 1) / other.share


class _MinCounter:
    """Finds the lowest counter of many clients.

    Counters only grow, so that an old value is a lower bound and a heap may hold it.
    """

    def __init__(self) -> None:
        # Each client once, with a counter that it had.
        self._heap: list[tuple[float, int, Client]] = []
        self._number = itertools.count()

    def add(self, client: Client, num_active: int) -> None:
        # Inactive clients are removed when they are as many as the active ones.
        if len(self._heap) > 2 * num_active + _MIN_COMPACTED:
            self._heap = [entry for entry in self._heap if entry[2].is_active]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (client.counter, next(self._number), client))

    def counter(self, other_than: Client) -> float | None:
        """Return the lowest counter of the other active clients; None if there is no other."""
        own = None
        found = None
        while self._heap and found is None:
            counter, number, client = self._heap[0]
            if not client.is_active:
                heapq.heappop(self._heap)
            elif client is other_than:
                own = heapq.heappop(self._heap)
            elif counter < client.counter:
                heapq.heapreplace(self._heap, (client.counter, number, client))
            else:
                found = counter
        if own is not None:
            heapq.heappush(self._heap, own)
        return found


class ClientTable:
    """The clients of one level: all active ones, and the counters of a few inactive ones."""

    def __init__(self, num_protected_slots: int = 0) -> None:
        self._num_protected_slots = num_protected_slots
        self._active: dict[Hashable, Client] = {}
        self._min_counter = _MinCounter()
        # Counters of inactive clients that were above the minimum; first the longest inactive one.
        self._remembered: OrderedDict[Hashable, float] = OrderedDict()
        self._last_counter = 0.0

    def add_waiting(self, key: Hashable, share: float) -> Client:
        """Count one more waiting sequence; apply R3 to a client that had none."""
        client = self._active.get(key)
        if client is None:
            client = self._active[key] = Client(
                self._remembered.pop(key, 0.0), num_protected_slots=self._num_protected_slots
            )
            self._min_counter.add(client, len(self._active))
        if client.num_waiting == 0:
            self._lift_counter(client)
        client.share = share
        client.num_waiting += 1
        return client

    def _lift_counter(self, client: Client) -> None:
        """R3: raises the counter to the lowest of the others, so that absence earns no credit."""
        lowest = self._min_counter.counter(client)
        client.counter = max(client.counter, self._last_counter if lowest is None else lowest)

    def remove_if_idle(self, key: Hashable) -> bool:
        """Remove a client of which no sequence waits or runs; return whether it was removed."""
        client = self._active[key]
        if client.num_waiting or client.num_running:
            return False
        del self._active[key]
        client.is_active = False
        self._last_counter = client.counter
        lowest = self._min_counter.counter(client)
        if lowest is not None and client.counter > lowest:
            self._remembered[key] = client.counter
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return True

    def check_integrity(self, waiting: Counter[Hashable], running: Counter[Hashable]) -> None:
        assert self._active.keys() == waiting.keys() | running.keys(), "an idle client is active"
        for key, client in self._active.items():
            counts = (client.num_waiting, client.num_running)
            assert counts == (waiting[key], running[key]), f"{key} has {counts}"
        assert len(self._remembered) <= MAX_REMEMBERED
        assert all(client.is_active for client in self._active.values()), "an inactive client"


@dataclass(frozen=True, slots=True, eq=False)
class Clients:
    """The two clients of a sequence: its tenant, and its set of adapters in the tenant."""

    tenant: Client
    adapter: Client

    def charge(self, cost: float) -> None:
        """R2: adds virtual tokens to both counters."""
        tenant, adapter = self.tenant, self.adapter
        tenant.counter += cost / tenant.share
        adapter.counter += cost / adapter.share

    def start(self) -> None:
        """Count a sequence that leaves the queue for the batch."""
        self._count(waiting=-1, running=1)

    def stop(self) -> None:
        """Count a sequence that returns from the batch to the queue."""
        self._count(waiting=1, running=-1)

    def leave(self, *, is_running: bool) -> None:
        """Count a sequence that has ended."""
        self._count(waiting=is_running - 1, running=-is_running)

    def _count(self, *, waiting: int, running: int) -> None:
        for client in (self.tenant, self.adapter):
            client.num_waiting += waiting
            client.num_running += running


class FairShares:
    """The clients of both levels: tenants, and adapters inside each tenant."""

    def __init__(self, num_protected_slots: int = 0) -> None:
        self._num_protected_slots = num_protected_slots
        self._tenants = ClientTable()
        self._adapters: dict[str, ClientTable] = {}

    def arrive(self, request: SharedRequest) -> Clients:
        """Count a waiting sequence of the request."""
        adapters = self._adapters.setdefault(request.tenant, ClientTable(self._num_protected_slots))
        return Clients(
            self._tenants.add_waiting(request.tenant, request.tenant_share),
            adapters.add_waiting(request.cids, request.adapter_share),
        )

    def leave(self, request: SharedRequest, clients: Clients, *, is_running: bool) -> None:
        clients.leave(is_running=is_running)
        self._adapters[request.tenant].remove_if_idle(request.cids)
        if self._tenants.remove_if_idle(request.tenant):
            del self._adapters[request.tenant]

    def check_integrity(
        self, waiting: Iterable[SharedRequest], running: Iterable[SharedRequest]
    ) -> None:
        waiting, running = list(waiting), list(running)
        self._tenants.check_integrity(
            Counter(request.tenant for request in waiting),
            Counter(request.tenant for request in running),
        )
        assert self._adapters.keys() == {request.tenant for request in waiting + running}
        for tenant, table in self._adapters.items():
            table.check_integrity(
                Counter(request.cids for request in waiting if request.tenant == tenant),
                Counter(request.cids for request in running if request.tenant == tenant),
            )


@dataclass(frozen=True, slots=True, eq=False)
class PreemptionLimit:
    """R11: the counters below which other clients may preempt a running sequence."""

    clients: Clients
    tenant_limit: float
    adapter_limit: float

    def allows(self, clients: Clients) -> bool:
        """R10: compares adapters inside a tenant, and tenants otherwise."""
        own = self.clients
        if clients.tenant is own.tenant:
            return clients.adapter.may_preempt(own.adapter, self.adapter_limit)
        return clients.tenant.may_preempt(own.tenant, self.tenant_limit)


class PreemptionIndex:
    """Finds out for thousands of queues whether any running sequence may be preempted for them."""

    def __init__(self, limits: Iterable[PreemptionLimit]) -> None:
        tenants: dict[Client, float] = {}
        adapters: dict[Client, dict[Client, float]] = {}
        for limit in limits:
            tenant, adapter = limit.clients.tenant, limit.clients.adapter
            tenants[tenant] = max(tenants.get(tenant, 0.0), limit.tenant_limit)
            inside = adapters.setdefault(tenant, {})
            inside[adapter] = max(inside.get(adapter, 0.0), limit.adapter_limit)
        self._tenants = _highest_first(tenants)
        self._adapters = {tenant: _highest_first(inside) for tenant, inside in adapters.items()}
        self._has_tenant_victim: dict[Client, bool] = {}

    def has_victim_for(self, clients: Clients) -> bool:
        tenant = clients.tenant
        if tenant not in self._has_tenant_victim:
            self._has_tenant_victim[tenant] = _has_victim(tenant, self._tenants)
        return self._has_tenant_victim[tenant] or _has_victim(
            clients.adapter, self._adapters.get(tenant, [])
        )


def _highest_first(limits: dict[Client, float]) -> list[tuple[float, Client]]:
    return sorted(((limit, client) for client, limit in limits.items()), key=lambda e: -e[0])


def _has_victim(client: Client, others: list[tuple[float, Client]]) -> bool:
    for limit, other in others:
        if client.counter >= limit:
            return False
        if other is not client and client.may_preempt(other, limit):
            return True
    return False


def check_shares(request: Request) -> None:
    """Raise InvalidRequest for shares or a timeout that are not positive and finite."""
    numbers = {
        "tenant_share": request.tenant_share,
        "adapter_share": request.adapter_share,
        "timeout_s": 1.0 if request.timeout_s is None else request.timeout_s,
    }
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise InvalidRequest(f"{name} must be over 0 and finite, got {value}.", param=name)
