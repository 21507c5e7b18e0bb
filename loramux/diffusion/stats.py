"""Statistics of an image engine, and residency and usage of its adapters."""

from __future__ import annotations

from loramux.backend.host import AdapterUse
from loramux.backend.images import ImageStats
from loramux.diffusion.engine import ImageEngine
from loramux.memory import reports


def engine_stats(engine: ImageEngine) -> ImageStats:
    """Return all statistics but `resident_adapters`, which is reported as changes."""
    memory = engine.memory
    tier, device = memory.tier, memory.tier.costs.device
    return ImageStats(
        num_running=engine.num_running,
        num_waiting=engine.num_waiting,
        num_pages=tier.pages.num_pages,
        num_free_pages=tier.pages.num_free,
        num_idle_pages=tier.reclaimer.num_available - tier.pages.num_free,
        num_adapter_pages=memory.residency.num_held_pages,
        num_preemptions=engine.num_pauses,
        num_adapter_loads=device.loads,
        num_adapter_evictions=device.evictions,
        num_steps=engine.num_forwards,
        running_adapters=engine.running_adapters(),
        waiting_adapters=engine.waiting_adapters(),
        waiting_tenants=engine.waiting_tenants(),
        tiers=reports.tier_stats(
            memory.residency,
            memory.tiers,
            tier.costs,
            page_bytes=memory.options.page_bytes,
            device_bytes=tier.pages.num_pages * memory.options.page_bytes,
        ),
        step_s=tier.costs.step_s,
        tier_s=tier.costs.load_seconds(),
        num_paused=engine.num_paused,
        rows_per_forward=dict(engine.forwards.rows),
        adapters_per_forward=dict(engine.forwards.adapters),
    )


def adapter_uses(engine: ImageEngine) -> list[AdapterUse]:
    memory = engine.memory
    return reports.adapter_uses(
        memory.catalog.known(),
        memory.residency,
        clock_s=memory.clock(),
        running=engine.running_adapters(),
        waiting=engine.waiting_adapters(),
    )
