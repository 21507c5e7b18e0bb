"""The state and counters of the engine as replies show them."""

from __future__ import annotations

from loramux.backend import TierStats
from loramux.server.context import Context
from loramux.server.wire import EngineReport, TierEntry


def engine_report(context: Context) -> EngineReport:
    backend, total = context.backend, context.metrics.total
    stats, card = backend.stats, backend.card
    return EngineReport(
        model=context.base_names[0],
        status=backend.health.value,
        restarts=backend.num_restarts,
        device=card.device,
        gpu_name=card.gpu_name,
        fallback_reason=card.fallback_reason,
        dtype=card.dtype,
        max_batch_tokens=card.max_batch_tokens,
        max_sequences=card.max_sequences,
        running=stats.num_running,
        waiting=stats.num_waiting,
        steps=stats.num_steps,
        preemptions=stats.num_preemptions,
        pages=stats.num_pages,
        free_pages=stats.num_free_pages,
        page_bytes=card.pool_bytes // stats.num_pages if stats.num_pages else 0,
        requests=total.num_requests,
        prompt_tokens=total.num_prompt_tokens,
        generation_tokens=total.num_generation_tokens,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        tiers=[tier_entry(tier) for tier in stats.tiers],
    )


def tier_entry(tier: TierStats) -> TierEntry:
    return TierEntry(
        tier=tier.tier,
        budget_bytes=tier.budget_bytes,
        used_bytes=tier.used_bytes,
        adapters=tier.num_adapters,
        hits=tier.hits,
        misses=tier.misses,
        loads=tier.loads,
        evictions=tier.evictions,
        failures=tier.failures,
        load_seconds=tier.load_seconds,
        load_bytes=tier.load_bytes,
    )
