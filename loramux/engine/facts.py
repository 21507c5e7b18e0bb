"""How each request came to its first token: noted at arrival, told with its first event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from loramux.memory.records import LowerTiers
from loramux.memory.residency import AdapterResidency
from loramux.memory.tiers import AdapterState
from loramux.types.request import Request, RequestFacts, TokenEvent
from loramux.types.step import StepPlan

_SLOWEST_FIRST = (
    AdapterState.SOURCE,
    AdapterState.DISK,
    AdapterState.READING,
    AdapterState.HOST,
    AdapterState.COPYING,
    AdapterState.DEVICE,
)


@dataclass(frozen=True, slots=True)
class _Arrival:
    time_s: float
    cids: tuple[str, ...]
    found: AdapterState | None
    queue_depth: int


class FactsKeeper:
    def __init__(self, residency: AdapterResidency, tiers: LowerTiers) -> None:
        self._residency = residency
        self._tiers = tiers
        self._open: dict[str, _Arrival] = {}

    def __len__(self) -> int:
        return len(self._open)

    def arrive(self, request: Request, *, now: float, queue_depth: int) -> None:
        """Before its adapters are asked for."""
        cids = tuple(cid for cid, _ in request.selection)
        states = [self._place_of(cid) for cid in cids]
        found = min(states, key=_SLOWEST_FIRST.index) if states else None
        self._open[request.request_id] = _Arrival(now, cids, found, queue_depth)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def _place_of(self, cid: str) -> AdapterState:
        record = self._residency.records.get(cid)
        if record is not None and (record.is_in_flight or cid in self._residency):
            return record.state
        return self._tiers.resting_place(cid)

    def _load_s(self, cid: str) -> float:
        record = self._residency.records.get(cid)
        return 0.0 if record is None else record.load_s

    def tell(self, events: Iterable[TokenEvent], plan: StepPlan | None) -> list[TokenEvent]:
        return [self._with_facts(event, plan) for event in events]

    def _with_facts(self, event: TokenEvent, plan: StepPlan | None) -> TokenEvent:
        arrival = self._open.pop(event.request_id, None)
        if arrival is None:
            return event
        is_cold = arrival.found is not None and arrival.found is not AdapterState.DEVICE
        selections = () if plan is None else (chunk.selection for chunk in plan.chunks)
        facts = RequestFacts(
            tier_found=None if arrival.found is None else _tier(arrival.found),
            load_s=max(map(self._load_s, arrival.cids)) if is_cold else 0.0,
            queue_depth=arrival.queue_depth,
            queue_s=0.0 if event.started_s is None else event.started_s - arrival.time_s,
            num_distinct=len({cid for selection in selections for cid, _ in selection}),
        )
        return msgspec.structs.replace(event, facts=facts)


def _tier(state: AdapterState) -> str:
    """Bytes on their way count where they come from."""
    if state is AdapterState.COPYING:
        return str(AdapterState.HOST)
    return str(AdapterState.DISK if state is AdapterState.READING else state)
