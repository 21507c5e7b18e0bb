"""Statistics of the engine, and residency and usage of its adapters."""

from __future__ import annotations

import time

from loramux.backend import AdapterUse, EngineStats, TierStats
from loramux.engine.engine import Engine
from loramux.engine.memory import STALL_BUCKETS_S
from loramux.memory.records import AdapterRecord
from loramux.memory.tiers import TierCounters


def engine_stats(engine: Engine, *, num_steps: int) -> EngineStats:
    """Returns all statistics but `resident_adapters`, which is reported as changes."""
    memory = engine.memory
    device = memory.costs.device
    prefixes = memory.prefixes
    return EngineStats(
        num_running=engine.scheduler.num_running,
        num_waiting=engine.scheduler.num_waiting,
        num_pages=engine.pages.num_pages,
        num_free_pages=engine.pages.num_free,
        num_idle_pages=memory.reclaimer.num_available - engine.pages.num_free,
        num_adapter_pages=engine.residency.num_held_pages,
        num_prefix_pages=0 if prefixes is None else prefixes.num_pages,
        num_preemptions=engine.scheduler.num_preemptions,
        num_adapter_loads=device.loads,
        num_adapter_evictions=device.evictions,
        num_steps=num_steps,
        running_adapters=engine.scheduler.running_adapters(),
        waiting_adapters=engine.scheduler.waiting_adapters(),
        waiting_tenants=engine.scheduler.waiting_tenants(),
        tiers=tier_stats(engine),
        prefix_query_tokens=0 if prefixes is None else prefixes.num_query_tokens,
        prefix_hit_tokens=0 if prefixes is None else prefixes.num_hit_tokens,
        step_loss_s=_losses(memory.stalls.counts),
        step_loss_sum_s=memory.stalls.total_s,
        waiting_tokens=engine.scheduler.waiting_tokens(),
        step_s=memory.costs.step_s,
        token_s=memory.costs.token_s,
        tier_s=memory.costs.load_seconds(),
    )


def tier_stats(engine: Engine) -> tuple[TierStats, ...]:
    tiers, pool, residency = engine.memory.tiers, engine.memory.pool, engine.residency
    used = residency.num_held_pages * pool.page_bytes
    device = _stats(
        "device", engine.memory.costs.device, pool.storage.nbytes, used, len(residency.resident)
    )
    host = tiers.host
    stats = [
        device,
        _stats("host", host.counters, host.budget_bytes, host.used_bytes, len(host)),
    ]
    if tiers.disk is not None:
        disk = tiers.disk
        stats.append(_stats("disk", disk.counters, disk.budget_bytes, disk.used_bytes, len(disk)))
    return tuple(stats)


def adapter_uses(engine: Engine) -> list[AdapterUse]:
    """Returns residency and usage of every registered adapter, used or not."""
    running, waiting = engine.scheduler.running_adapters(), engine.scheduler.waiting_adapters()
    prefixes = engine.memory.prefixes
    # Records have times of the engine's clock; callers get seconds since the epoch.
    epoch_s = time.time() - engine.memory.clock()
    uses = []
    for known in engine.catalog.known():
        record = engine.residency.records.get(known.cid)
        last_use_s = None if record is None else record.last_use_s
        uses.append(
            AdapterUse(
                cid=known.cid,
                tier=_tier(engine, known.cid, record),
                num_bytes=known.num_bytes,
                rank=known.rank,
                hits=0 if record is None else record.hits,
                misses=0 if record is None else record.misses,
                last_use_s=None if last_use_s is None else epoch_s + last_use_s,
                is_pinned=record is not None and record.is_pinned,
                num_running=running.get(known.cid, 0),
                num_waiting=waiting.get(known.cid, 0),
                cached_tokens=0 if prefixes is None else prefixes.cached_tokens(known.cid),
            )
        )
    return uses


def _tier(engine: Engine, cid: str, record: AdapterRecord | None) -> str:
    if record is not None and record.is_in_flight:
        return "loading"
    if cid in engine.residency:
        return "device"
    return str(engine.memory.placement.resting_state(cid))


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


def _losses(counts: list[int]) -> dict[str, int]:
    bounds = [*(str(bound) for bound in STALL_BUCKETS_S), "+Inf"]
    return dict(zip(bounds, counts, strict=True))
