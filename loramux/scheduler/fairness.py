"""Who has had how much: virtual tokens per tenant and, inside a tenant, per adapter."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from loramux.errors import InvalidRequest
from loramux.types.request import Request

PROMPT_TOKEN_COST = 1.0
# A token of output occupies a place in the batch for a whole step.
OUTPUT_TOKEN_COST = 2.0
# How far ahead somebody may be and still go first where that keeps the number of adapters in a
# batch down. Adapters of one tenant: some ten requests. Tenants: a short prompt with its answer.
MAX_ADAPTER_LEAD = 8192.0
MAX_TENANT_LEAD = 128.0
MAX_REMEMBERED = 1024
_FEW = 64


@dataclass(slots=True, eq=False)
class Account:
    """What a tenant, or an adapter of a tenant, has had: virtual tokens divided by its weight."""

    counter: float = 0.0
    weight: float = 1.0
    num_waiting: int = 0
    num_running: int = 0
    num_kept: int = 0
    """Places of it that nobody takes."""
    is_open: bool = True
    """Something of it waits or runs."""

    @property
    def has_to_give(self) -> bool:
        """Whether anybody might take a place from it, as things stand."""
        return self.num_running > self.num_kept and self.num_running + self.num_waiting > 1

    def may_take_from(self, other: Account, limit: float) -> bool:
        """It has had less than the limit, and has no place, or fewer than half of the other's.

        Who has but one request open, or few places, is not taken from.
        """
        if self.counter >= limit or not other.has_to_give:
            return False
        mine = (self.num_running + 1) / self.weight
        return self.num_running == 0 or 2 * mine <= (other.num_running - 1) / other.weight


class _Lowest:
    """Which of many accounts has had least. Counters only grow, so an old one is a lower bound."""

    def __init__(self) -> None:
        # Each account once, with a counter that it had.
        self._heap: list[tuple[float, int, Account]] = []
        self._number = itertools.count()

    def add(self, account: Account, num_open: int) -> None:
        # The closed are left where they are, until they are as many as the others.
        if len(self._heap) > 2 * num_open + _FEW:
            self._heap = [entry for entry in self._heap if entry[2].is_open]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (account.counter, next(self._number), account))

    def counter(self, other_than: Account) -> float | None:
        """The lowest counter of an open account; None: there is no other."""
        own = None
        found = None
        while self._heap and found is None:
            counter, number, account = self._heap[0]
            if not account.is_open:
                heapq.heappop(self._heap)
            elif account is other_than:
                own = heapq.heappop(self._heap)
            elif counter < account.counter:
                heapq.heapreplace(self._heap, (account.counter, number, account))
            else:
                found = counter
        if own is not None:
            heapq.heappush(self._heap, own)
        return found


class Ledger:
    """The accounts of one level. Those of whom nothing waits or runs are kept in small number."""

    def __init__(self, num_kept: int = 0) -> None:
        self._num_kept = num_kept
        self._open: dict[Hashable, Account] = {}
        self._lowest = _Lowest()
        # Counters of the absent who had more than others, the longest absent first.
        self._remembered: OrderedDict[Hashable, float] = OrderedDict()
        self._last_counter = 0.0

    def arrive(self, key: Hashable, weight: float) -> Account:
        """One more request. Whoever had none waiting is lifted: absence earns no credit."""
        account = self._open.get(key)
        if account is None:
            account = self._open[key] = Account(
                self._remembered.pop(key, 0.0), num_kept=self._num_kept
            )
            self._lowest.add(account, len(self._open))
        if account.num_waiting == 0:
            least = self._lowest.counter(account)
            account.counter = max(account.counter, self._last_counter if least is None else least)
        account.weight = weight
        account.num_waiting += 1
        return account

    def settle(self, key: Hashable) -> bool:
        """Closes the account if nothing of it waits or runs any more."""
        account = self._open[key]
        if account.num_waiting or account.num_running:
            return False
        del self._open[key]
        account.is_open = False
        self._last_counter = account.counter
        least = self._lowest.counter(account)
        if least is not None and account.counter > least:
            self._remembered[key] = account.counter
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return True

    def check_integrity(self, waiting: Counter[Hashable], running: Counter[Hashable]) -> None:
        assert self._open.keys() == waiting.keys() | running.keys(), "an account too many"
        for key, account in self._open.items():
            counts = (account.num_waiting, account.num_running)
            assert counts == (waiting[key], running[key]), f"{key} has {counts}"
        assert len(self._remembered) <= MAX_REMEMBERED
        assert all(account.is_open for account in self._open.values()), "closed, and yet there"


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """One tenant's use of one selection of adapters (the base is one, too)."""

    tenant: Account
    adapter: Account

    def charge(self, cost: float) -> None:
        tenant, adapter = self.tenant, self.adapter
        tenant.counter += cost / tenant.weight
        adapter.counter += cost / adapter.weight

    def start(self) -> None:
        self._count(waiting=-1, running=1)

    def stop(self) -> None:
        self._count(waiting=1, running=-1)

    def leave(self, *, is_running: bool) -> None:
        self._count(waiting=is_running - 1, running=-is_running)

    def _count(self, *, waiting: int, running: int) -> None:
        for account in (self.tenant, self.adapter):
            account.num_waiting += waiting
            account.num_running += running


class FairShares:
    def __init__(self, num_kept: int = 0) -> None:
        self._num_kept = num_kept
        self._tenants = Ledger()
        self._adapters: dict[str, Ledger] = {}

    def arrive(self, request: Request) -> Standing:
        adapters = self._adapters.setdefault(request.tenant, Ledger(self._num_kept))
        return Standing(
            self._tenants.arrive(request.tenant, request.tenant_share),
            adapters.arrive(request.selection, request.adapter_share),
        )

    def leave(self, request: Request, standing: Standing, *, is_running: bool) -> None:
        standing.leave(is_running=is_running)
        self._adapters[request.tenant].settle(request.selection)
        if self._tenants.settle(request.tenant):
            del self._adapters[request.tenant]

    def check_integrity(self, waiting: Iterable[Request], running: Iterable[Request]) -> None:
        waiting, running = list(waiting), list(running)
        self._tenants.check_integrity(
            Counter(request.tenant for request in waiting),
            Counter(request.tenant for request in running),
        )
        assert self._adapters.keys() == {request.tenant for request in waiting + running}
        for tenant, ledger in self._adapters.items():
            ledger.check_integrity(
                Counter(request.selection for request in waiting if request.tenant == tenant),
                Counter(request.selection for request in running if request.tenant == tenant),
            )


@dataclass(frozen=True, slots=True, eq=False)
class Tenure:
    """A running sequence's hold on its place: whose counters are below these may take it."""

    standing: Standing
    tenant_limit: float
    adapter_limit: float

    def yields_to(self, standing: Standing) -> bool:
        mine = self.standing
        if standing.tenant is mine.tenant:
            return standing.adapter.may_take_from(mine.adapter, self.adapter_limit)
        return standing.tenant.may_take_from(mine.tenant, self.tenant_limit)


class Debtors:
    """Whether any of the running yields to somebody; quick for a thousand who ask."""

    def __init__(self, tenures: Iterable[Tenure]) -> None:
        tenants: dict[Account, float] = {}
        adapters: dict[Account, dict[Account, float]] = {}
        for tenure in tenures:
            tenant, adapter = tenure.standing.tenant, tenure.standing.adapter
            tenants[tenant] = max(tenants.get(tenant, 0.0), tenure.tenant_limit)
            inside = adapters.setdefault(tenant, {})
            inside[adapter] = max(inside.get(adapter, 0.0), tenure.adapter_limit)
        self._tenants = _highest_first(tenants)
        self._adapters = {tenant: _highest_first(inside) for tenant, inside in adapters.items()}
        self._owed: dict[Account, bool] = {}

    def owe(self, standing: Standing) -> bool:
        tenant = standing.tenant
        if tenant not in self._owed:
            self._owed[tenant] = _is_owed(tenant, self._tenants)
        return self._owed[tenant] or _is_owed(standing.adapter, self._adapters.get(tenant, []))


def _highest_first(limits: dict[Account, float]) -> list[tuple[float, Account]]:
    return sorted(((limit, account) for account, limit in limits.items()), key=lambda e: -e[0])


def _is_owed(account: Account, others: list[tuple[float, Account]]) -> bool:
    for limit, other in others:
        if account.counter >= limit:
            return False
        if other is not account and account.may_take_from(other, limit):
            return True
    return False


def check_shares(request: Request) -> None:
    numbers = {
        "tenant_share": request.tenant_share,
        "adapter_share": request.adapter_share,
        "timeout_s": 1.0 if request.timeout_s is None else request.timeout_s,
    }
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise InvalidRequest(f"{name} must be over 0 and finite, got {value}.", param=name)
