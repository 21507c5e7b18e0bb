"""The residency report that routers poll: load, state, and moves between the tiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from loramux.backend import EngineStats, Health, ModelCard
from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.types.replica_report import MAX_WAIT_S, ResidencyReport
from loramux.types.residency import key_of_cid

N = TypeVar("N", int, float)
# Before the engine has reported: of an adapter in no tier, on disk, in host memory, on the device.
_UNKNOWN_TIER_S = [0.5, 0.5, 0.05, 0.005, 0.0025, 0.0]


def read_asked(query: Mapping[str, str]) -> tuple[int, str, float]:
    """Returns `since`, `instance` and the seconds to wait; raises InvalidRequest."""
    wait_s = min(_number(query, "wait_s", 0.0, float), MAX_WAIT_S)
    return _number(query, "since", -1, int), query.get("instance", ""), wait_s


async def wait_for_news(context: Context, *, since: int, instance: str, wait_s: float) -> None:
    """Returns when something moved after a generation, the state changed, or after `wait_s`."""
    view, state = context.backend.residency, context.backend.health
    is_current = instance == view.instance and since == view.generation
    if is_current and wait_s > 0 and state not in (Health.DRAINING, Health.STOPPED):
        await view.wait(wait_s)


def residency_report(context: Context, *, since: int, instance: str) -> ResidencyReport:
    backend = context.backend
    stats, moves = backend.stats, backend.residency.since(since, instance)
    has_card = backend.health is not Health.STARTING
    registry = context.registry
    return ResidencyReport(
        instance=moves.instance,
        since=since,
        generation=moves.generation,
        full=moves.is_full,
        moves={key_of_cid(cid): int(tier) for cid, tier in moves.tiers.items()},
        state=backend.health.value,
        base=context.base_names[0] if has_card else "",
        base_digest=backend.card.digest if has_card else "",
        revision=0 if registry is None else registry.revision,
        open=stats.num_running + stats.num_waiting,
        waiting=stats.num_waiting,
        waiting_tokens=stats.waiting_tokens,
        slots=_slots(stats, backend.card) if has_card else 1,
        step_s=stats.step_s,
        token_s=stats.token_s,
        tier_s=list(stats.tier_s) or _UNKNOWN_TIER_S,
        free_pages=stats.num_free_pages,
        answer_tokens=context.metrics.answer_tokens,
    )


def _slots(stats: EngineStats, card: ModelCard) -> int:
    """Estimates from the pages of the running sequences how many more would run at once."""
    if not stats.num_running:
        return card.max_sequences
    available = stats.num_free_pages + stats.num_idle_pages
    pages_each = max(1.0, (stats.num_pages - available) / stats.num_running)
    return max(1, min(card.max_sequences, stats.num_running + int(available / pages_each)))


def _number(asked: Mapping[str, str], name: str, default: N, kind: Callable[[str], N]) -> N:
    """Reads a finite number of the query; raises InvalidRequest."""
    try:
        number = kind(asked[name]) if name in asked else default
    except ValueError as error:
        raise InvalidRequest(f"{name} is no number: {asked[name][:50]!r}.", param=name) from error
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be finite.", param=name)
    return number
