"""The state and counters of the engine as replies show them."""

from __future__ import annotations

from msgspec import UNSET

from loramux.backend.host import HostCard, TierStats
from loramux.backend.images import ImageCard
from loramux.backend.text import ModelCard
from loramux.server.context import HostContext
from loramux.wire.text import EngineReport, TierEntry


def engine_report(context: HostContext) -> EngineReport:
    """Report the engine of the first model, and that of the image model beside it in `image`."""
    report = _host_report(context)
    for host in context.others:
        report.image = _host_report(host)
    return report


def _host_report(context: HostContext) -> EngineReport:
    backend, total = context.backend, context.metrics.total
    stats, card = backend.stats, backend.card
    return EngineReport(
        modality="image" if context.modality == "image" else UNSET,
        model=context.base_names[0],
        status=backend.health.value,
        restarts=backend.num_restarts,
        device=card.device,
        gpu_name=card.gpu_name,
        fallback_reason=card.fallback_reason,
        dtype=card.dtype,
        kv_cache_dtype=(card.kv_cache_dtype or card.dtype)
        if isinstance(card, ModelCard)
        else UNSET,
        max_batch_tokens=_batch_tokens(card),
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
        kernels=stats.kernels or UNSET,
    )


def _batch_tokens(card: HostCard) -> int:
    """Tokens of a step; image tokens for an image model."""
    if isinstance(card, ImageCard):
        return card.max_tokens
    return card.max_batch_tokens if isinstance(card, ModelCard) else 0


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
