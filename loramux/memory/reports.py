"""What an engine reports of its adapters: the tiers, and residency and usage of each adapter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from loramux.backend.host import AdapterUse, TierStats
from loramux.memory.cost import CostModel
from loramux.memory.records import AdapterRecord
from loramux.memory.residency import AdapterResidency, LowerTiers
from loramux.memory.tiers import TierCounters
from loramux.types.adapter import AdapterCard


def tier_stats(
    residency: AdapterResidency,
    tiers: LowerTiers,
    costs: CostModel,
    *,
    page_bytes: int,
    device_bytes: int,
) -> tuple[TierStats, ...]:
    used = residency.num_held_pages * page_bytes
    host = tiers.host
    stats = [
        _stats("device", costs.device, device_bytes, used, len(residency.resident)),
        _stats("host", host.counters, host.budget_bytes, host.used_bytes, len(host)),
    ]
    if tiers.disk is not None:
        disk = tiers.disk
        stats.append(_stats("disk", disk.counters, disk.budget_bytes, disk.used_bytes, len(disk)))
    return tuple(stats)


def adapter_uses(
    known: Iterable[AdapterCard],
    residency: AdapterResidency,
    *,
    clock_s: float,
    running: Mapping[str, int],
    waiting: Mapping[str, int],
    cached_tokens: Callable[[str], int] = lambda cid: 0,
) -> list[AdapterUse]:
    """Return residency and usage of every registered adapter, used or not.

    `clock_s`: the time now of the clock that gave the records their times.
    """
    # Records have times of the engine's clock; callers get seconds since the epoch.
    epoch_s = time.time() - clock_s
    uses = []
    for card in known:
        record = residency.records.get(card.cid)
        last_use_s = None if record is None else record.last_use_s
        uses.append(
            AdapterUse(
                cid=card.cid,
                tier=_tier(residency, card.cid, record),
                num_bytes=card.num_bytes,
                rank=card.rank,
                hits=0 if record is None else record.hits,
                misses=0 if record is None else record.misses,
                last_use_s=None if last_use_s is None else epoch_s + last_use_s,
                is_pinned=record is not None and record.is_pinned,
                num_running=running.get(card.cid, 0),
                num_waiting=waiting.get(card.cid, 0),
                cached_tokens=cached_tokens(card.cid),
            )
        )
    return uses


def _tier(residency: AdapterResidency, cid: str, record: AdapterRecord | None) -> str:
    is_loading = record is not None and record.is_in_flight
    return "loading" if is_loading else str(residency.tier_of(cid))


def _stats(
    tier: str, counters: TierCounters, budget_bytes: int, used_bytes: int, num_adapters: int
) -> TierStats:
    return TierStats(
        tier=tier,
        budget_bytes=budget_bytes,
        used_bytes=used_bytes,
        num_adapters=num_adapters,
        hits=counters.hits,
        misses=counters.misses,
        loads=counters.loads,
        evictions=counters.evictions,
        load_seconds=counters.load_seconds,
        load_bytes=counters.load_bytes,
        failures=counters.failures,
    )
