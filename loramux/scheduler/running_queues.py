"""Waiting lanes that bring no further adapter into the batch, or one for several requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from loramux.scheduler.batch import Batch
from loramux.scheduler.fairness import MAX_ADAPTER_LEAD, MAX_TENANT_LEAD, Account, Standing
from loramux.scheduler.queue import Candidates, Lane, fair_rank


class RunningLanes:
    """One pass over the lanes whose adapters run, and over the full ones of the others.

    While it lasts, counters may only grow.
    """

    def __init__(self, lanes: Iterable[Lane], batch: Batch) -> None:
        self._batch = batch
        self._by_tenant: dict[Account, Candidates] = {}
        # Tenants who may have a lane for others, each once: (counter, something unique, tenant).
        self._tenants: list[tuple[float, int, Account]] = []
        self._listed: set[Account] = set()
        # What the least served adapter that waits had at the start of the pass.
        self._least: dict[Account, float] = {}
        # Those that lack an adapter, by the first that they lack.
        self._lacking: dict[str, list[Lane]] = {}
        # Under which each is listed: by now it may lack another one first.
        self._lacks: dict[Lane, str] = {}
        # Of those, where more than one waits: (-how many, something unique, lane).
        self._full: dict[Account, list[tuple[int, int, Lane]]] = {}
        for lane in lanes:
            standing = lane.standing
            tenant, counter = standing.tenant, standing.adapter.counter
            if counter < self._least.get(tenant, math.inf):
                self._least[tenant] = counter
            self.add(lane)

    def add(self, lane: Lane) -> None:
        """A lane that is new here, or was popped and still has somebody who waits."""
        if not lane:
            return
        missing = self._batch.lacking(lane.head.cids)
        self._lacks.pop(lane, None)
        if missing is not None:
            self._lacking.setdefault(missing, []).append(lane)
            self._lacks[lane] = missing
            self._add_full(lane)
            return
        tenant = lane.standing.tenant
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = Candidates((), fair_rank)
        self._by_tenant[tenant].push(lane)
        if tenant not in self._listed:
            self._listed.add(tenant)
            heapq.heappush(self._tenants, (tenant.counter, lane.head.sequence_id, tenant))

    def enter(self, cids: Iterable[str]) -> None:
        """These run from now on."""
        for cid in cids:
            for lane in self._lacking.pop(cid, ()):
                self.add(lane)

    def pop(self, best: Standing) -> Lane | None:
        """The first that may go before the best: of its tenant, else of one who had as little."""
        own = self._pop_of(best.tenant, best.adapter.counter + MAX_ADAPTER_LEAD)
        return self._pop_of_others(best.tenant) if own is None else own

    def pop_fuller(self, best: Lane) -> Lane | None:
        """The fullest of its tenant, if more wait there, so that one adapter serves them all.

        Those too far ahead of the best are left out for the rest of the pass.
        """
        full = self._full.get(best.standing.tenant, [])
        while full and -full[0][0] > len(best):
            num_waiting, _, lane = heapq.heappop(full)
            if not lane or lane not in self._lacks:
                continue
            if len(lane) < -num_waiting:
                self._add_full(lane)
            elif lane.standing.adapter.counter < best.standing.adapter.counter + MAX_ADAPTER_LEAD:
                self._lacking[self._lacks.pop(lane)].remove(lane)
                return lane
        return None

    def _add_full(self, lane: Lane) -> None:
        if len(lane) > 1:
            full = self._full.setdefault(lane.standing.tenant, [])
            heapq.heappush(full, (-len(lane), lane.head.sequence_id, lane))

    def _pop_of(self, tenant: Account, limit: float) -> Lane | None:
        lanes = self._by_tenant.get(tenant)
        while lanes is not None and (lane := lanes.pop()) is not None:
            if not self._batch.uses(lane.head.cids):
                self.add(lane)
            elif lane.standing.adapter.counter < limit:
                return lane
            else:
                lanes.push(lane)
                return None
        return None

    def _pop_of_others(self, mine: Account) -> Lane | None:
        found, put_back = None, []
        while found is None and self._tenants:
            counter, unique, tenant = self._tenants[0]
            if counter >= mine.counter + MAX_TENANT_LEAD:
                break
            heapq.heappop(self._tenants)
            if tenant.counter > counter:
                heapq.heappush(self._tenants, (tenant.counter, unique, tenant))
                continue
            if tenant is not mine:
                found = self._pop_of(tenant, self._least[tenant] + MAX_ADAPTER_LEAD)
            if tenant is mine or found is not None:
                put_back.append((counter, unique, tenant))
            else:
                # It has none for the rest of the pass, unless add() lists it again.
                self._listed.remove(tenant)
        for entry in put_back:
            heapq.heappush(self._tenants, entry)
        return found
