"""Records each request at its arrival, and attaches its facts to its first event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from loramux.memory.residency import AdapterResidency
from loramux.memory.tiers import AdapterState
from loramux.types.request import Request, RequestFacts, TokenEvent
from loramux.types.step import StepPlan


@dataclass(frozen=True, slots=True)
class _Arrival:
    time_s: float
    cids: tuple[str, ...]
    tier: AdapterState | None
    queue_depth: int


class RequestTracker:
    def __init__(self, residency: AdapterResidency) -> None:
        self._residency = residency
        self._open: dict[str, _Arrival] = {}

    def __len__(self) -> int:
        return len(self._open)

    def arrive(self, request: Request, *, now: float, queue_depth: int) -> None:
        """Record the tier of the request's adapters; call it before they are loaded."""
        cids = request.cids
        tier = self._residency.tier_found(cids)
        self._open[request.request_id] = _Arrival(now, cids, tier, queue_depth)

    def discard(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def attach_facts(self, events: Iterable[TokenEvent], plan: StepPlan | None) -> list[TokenEvent]:
        """Return the events of a step; the first event of each request has its facts."""
        return [self._with_facts(event, plan) for event in events]

    def _with_facts(self, event: TokenEvent, plan: StepPlan | None) -> TokenEvent:
        arrival = self._open.pop(event.request_id, None)
        if arrival is None:
            return event
        is_cold = arrival.tier is not None and arrival.tier is not AdapterState.DEVICE
        selections = () if plan is None else (chunk.selection for chunk in plan.chunks)
        facts = RequestFacts(
            tier_found=None if arrival.tier is None else str(arrival.tier),
            load_s=self._residency.load_s(arrival.cids) if is_cold else 0.0,
            queue_depth=arrival.queue_depth,
            queue_s=0.0 if event.started_s is None else event.started_s - arrival.time_s,
            num_distinct=len({cid for selection in selections for cid, _ in selection}),
        )
        return msgspec.structs.replace(event, facts=facts)
