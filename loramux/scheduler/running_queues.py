"""Adapter affinity: queues that add no adapter to the batch (R6), or one for several (R7)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from loramux.scheduler.batch import Batch
from loramux.scheduler.fairness import MAX_ADAPTER_LEAD, MAX_TENANT_LEAD, Client, Clients
from loramux.scheduler.queue import AdapterQueue, Candidates, fair_rank


class RunningQueues:
    """One pass over the queues whose adapters run, and over the longest of the others.

    Counters may only grow during the pass.
    """

    def __init__(self, queues: Iterable[AdapterQueue], batch: Batch) -> None:
        self._batch = batch
        self._by_tenant: dict[Client, Candidates] = {}
        # Tenants that may have a queue whose adapters run, each once: (counter, unique, tenant).
        self._tenants: list[tuple[float, int, Client]] = []
        self._listed: set[Client] = set()
        # Tenant -> lowest counter of its waiting adapters at the start of the pass.
        self._lowest: dict[Client, float] = {}
        # Queues with an adapter that does not run, by the first such adapter.
        self._by_missing: dict[str, list[AdapterQueue]] = {}
        # The key in _by_missing of each of these queues; its first missing adapter may be another
        # one by now.
        self._missing_of: dict[AdapterQueue, str] = {}
        # Of these, queues of two or more sequences by length: (-length, unique, queue).
        self._by_length: dict[Client, list[tuple[int, int, AdapterQueue]]] = {}
        for queue in queues:
            clients = queue.clients
            tenant, counter = clients.tenant, clients.adapter.counter
            if counter < self._lowest.get(tenant, math.inf):
                self._lowest[tenant] = counter
            self.add(queue)

    def add(self, queue: AdapterQueue) -> None:
        """Add a new queue, or one that was popped and is not empty."""
        if not queue:
            return
        missing = self._batch.first_missing(queue.head.cids)
        self._missing_of.pop(queue, None)
        if missing is not None:
            self._by_missing.setdefault(missing, []).append(queue)
            self._missing_of[queue] = missing
            self._add_by_length(queue)
            return
        tenant = queue.clients.tenant
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = Candidates((), fair_rank)
        self._by_tenant[tenant].push(queue)
        if tenant not in self._listed:
            self._listed.add(tenant)
            heapq.heappush(self._tenants, (tenant.counter, queue.head.sequence_id, tenant))

    def adapters_started(self, cids: Iterable[str]) -> None:
        """Update the pass after a sequence with these adapters was admitted."""
        for cid in cids:
            for queue in self._by_missing.pop(cid, ()):
                self.add(queue)

    def pop_running(self, first: Clients) -> AdapterQueue | None:
        """R6: returns the first queue that may be served before `first`, with its adapters running.

        Queues of the same tenant come before those of other tenants.
        """
        own = self._pop_of(first.tenant, first.adapter.counter + MAX_ADAPTER_LEAD)
        return self._pop_of_others(first.tenant) if own is None else own

    def pop_longer(self, first: AdapterQueue) -> AdapterQueue | None:
        """R7: returns the longest queue of the same tenant, if it is longer than `first`.

        Queues with too large a lead over `first` are ignored for the rest of the pass.
        """
        by_length = self._by_length.get(first.clients.tenant, [])
        while by_length and -by_length[0][0] > len(first):
            length, _, queue = heapq.heappop(by_length)
            if not queue or queue not in self._missing_of:
                continue
            if len(queue) < -length:
                self._add_by_length(queue)
            elif queue.clients.adapter.counter < first.clients.adapter.counter + MAX_ADAPTER_LEAD:
                self._by_missing[self._missing_of.pop(queue)].remove(queue)
                return queue
        return None

    def _add_by_length(self, queue: AdapterQueue) -> None:
        if len(queue) > 1:
            by_length = self._by_length.setdefault(queue.clients.tenant, [])
            heapq.heappush(by_length, (-len(queue), queue.head.sequence_id, queue))

    def _pop_of(self, tenant: Client, limit: float) -> AdapterQueue | None:
        """Return the tenant's first queue with an adapter counter below the limit."""
        queues = self._by_tenant.get(tenant)
        while queues is not None and (queue := queues.pop()) is not None:
            if not self._batch.runs_all(queue.head.cids):
                self.add(queue)
            elif queue.clients.adapter.counter < limit:
                return queue
            else:
                queues.push(queue)
                return None
        return None

    def _pop_of_others(self, own: Client) -> AdapterQueue | None:
        """Return the first queue of the other tenants with a lead below MAX_TENANT_LEAD."""
        found, put_back = None, []
        while found is None and self._tenants:
            counter, unique, tenant = self._tenants[0]
            if counter >= own.counter + MAX_TENANT_LEAD:
                break
            heapq.heappop(self._tenants)
            if tenant.counter > counter:
                heapq.heappush(self._tenants, (tenant.counter, unique, tenant))
                continue
            if tenant is not own:
                found = self._pop_of(tenant, self._lowest[tenant] + MAX_ADAPTER_LEAD)
            if tenant is own or found is not None:
                put_back.append((counter, unique, tenant))
            else:
                # Without a queue for the rest of the pass, unless add() lists the tenant again.
                self._listed.remove(tenant)
        for entry in put_back:
            heapq.heappush(self._tenants, entry)
        return found
