"""Statistics of the engine, and residency and usage of its adapters."""

from __future__ import annotations

from loramux.backend.host import AdapterUse, EngineStats, TierStats
from loramux.engine.engine import Engine
from loramux.engine.memory import STALL_BUCKETS_S
from loramux.memory import reports


def engine_stats(engine: Engine, *, num_steps: int) -> EngineStats:
    """Return all statistics but `resident_adapters`, which is reported as changes."""
    memory = engine.memory
    device = memory.costs.device
    prefixes = memory.prefixes
    drafts = engine.scheduler.drafts
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
        kernels=engine.executor.kernels,
        running_adapters=engine.scheduler.running_adapters(),
        waiting_adapters=engine.scheduler.waiting_adapters(),
        waiting_tenants=engine.scheduler.waiting_tenants(),
        tiers=tier_stats(engine),
        prefix_query_tokens=0 if prefixes is None else prefixes.num_query_tokens,
        prefix_hit_tokens=0 if prefixes is None else prefixes.num_hit_tokens,
        draft_tokens={} if drafts is None else drafts.num_drafts,
        accepted_draft_tokens={} if drafts is None else drafts.num_accepted,
        step_loss_s=_losses(memory.stalls.counts),
        step_loss_sum_s=memory.stalls.total_s,
        waiting_tokens=engine.scheduler.waiting_tokens(),
        step_s=memory.costs.step_s,
        token_s=memory.costs.token_s,
        tier_s=memory.costs.load_seconds(),
    )


def tier_stats(engine: Engine) -> tuple[TierStats, ...]:
    memory = engine.memory
    return reports.tier_stats(
        engine.residency,
        memory.tiers,
        memory.costs,
        page_bytes=memory.rank.page_bytes,
        device_bytes=engine.executor.pool_bytes,
    )


def adapter_uses(engine: Engine) -> list[AdapterUse]:
    memory, prefixes = engine.memory, engine.memory.prefixes
    return reports.adapter_uses(
        engine.catalog.known(),
        engine.residency,
        clock_s=memory.clock(),
        running=engine.scheduler.running_adapters(),
        waiting=engine.scheduler.waiting_adapters(),
        cached_tokens=(lambda cid: 0) if prefixes is None else prefixes.cached_tokens,
    )


def _losses(counts: list[int]) -> dict[str, int]:
    bounds = [*(str(bound) for bound in STALL_BUCKETS_S), "+Inf"]
    return dict(zip(bounds, counts, strict=True))
