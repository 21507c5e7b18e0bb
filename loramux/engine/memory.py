"""The engine's memory, put together: pages, the tiers of adapters, and the prefix cache."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from loramux.adapters.catalog import AdapterCatalog, AdapterRules
from loramux.adapters.packed.image import AdapterImage
from loramux.config.engine import EngineConfig
from loramux.memory.disk_tier import DiskTier
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader
from loramux.memory.offers import ResidencyLimits
from loramux.memory.pages import PageAllocator
from loramux.memory.policies import make_policy, miss_cost_s
from loramux.memory.pool import PagePool
from loramux.memory.prefix import PrefixCache
from loramux.memory.reclaim import Reclaimer
from loramux.memory.records import LowerTiers
from loramux.memory.residency import AdapterResidency

Clock = Callable[[], float]
# Upper bounds of the histogram of step time lost to loads, in seconds.
LOSS_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(slots=True)
class LossHistogram:
    """Time that the step loop itself spent on loads, for each step that had to do with one."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LOSS_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(LOSS_BUCKETS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    pool: PagePool
    pages: PageAllocator
    room: Reclaimer
    catalog: AdapterCatalog
    tiers: LowerTiers
    residency: AdapterResidency
    prefixes: PrefixCache | None
    clock: Clock
    losses: LossHistogram = field(default_factory=LossHistogram)

    def move_adapters(self) -> None:
        """Once a step: take what has been loaded, start what is wanted."""
        began = time.perf_counter()
        if self.residency.poll():
            self.losses.add(time.perf_counter() - began)

    def forget(self, cid: str) -> bool:
        """Frees all that an adapter holds; False: it is in use, and nothing was done."""
        if not self.residency.forget(cid):
            return False
        self.catalog.forget(cid)
        return True

    def close(self) -> None:
        self.tiers.loader.close()


def build_memory(
    config: EngineConfig,
    rules: AdapterRules,
    pool: PagePool,
    *,
    clock: Clock,
    loads: Executor | None = None,
) -> EngineMemory:
    pages = PageAllocator(pool.num_pages)
    room = Reclaimer(pages)
    policy = make_policy(config.eviction)
    catalog = AdapterCatalog(rules)
    tiers = _lower_tiers(config, pool, catalog, loads)
    residency = AdapterResidency(
        pages=pages,
        room=room,
        tiers=tiers,
        policy=policy,
        pages_for=pool.pages_for_elements,
        clock=clock,
    )
    residency.limits = ResidencyLimits(
        max_pages=_page_cap(config, pool), max_adapters=config.max_active_adapters
    )
    prefixes = None
    if config.prefix_cache:
        prefixes = PrefixCache(
            pages=pages,
            reclaimer=room,
            policy=policy,
            block_tokens=config.block_tokens,
            clock=clock,
        )
        residency.prefixes = prefixes
    return EngineMemory(
        pool=pool,
        pages=pages,
        room=room,
        catalog=catalog,
        tiers=tiers,
        residency=residency,
        prefixes=prefixes,
        clock=clock,
    )


def _lower_tiers(
    config: EngineConfig,
    pool: PagePool,
    catalog: AdapterCatalog,
    loads: Executor | None,
) -> LowerTiers:
    disk = None
    if config.disk_folder is not None and config.disk_space_bytes > 0:
        disk = DiskTier(
            Path(config.disk_folder).expanduser(),
            budget_bytes=config.disk_space_bytes,
            packing=catalog.rules.packing,
            policy=make_policy(config.eviction, is_lower_tier=True),
        )

    def write_pages(page_ids: list[int], image: AdapterImage) -> None:
        pool.write(page_ids, image.buffer)

    def cost_s(cid: str, num_bytes: int) -> float:
        return miss_cost_s(
            tiers.read_s(cid, num_bytes),
            is_held_above=cid in tiers.on_device,
            miss_rate_above=tiers.device_miss_rate,
        )

    host = HostTier(
        budget_bytes=config.host_memory_bytes,
        policy=make_policy(config.eviction, is_lower_tier=True),
        cost_s=cost_s,
        max_adapters=config.max_cpu_loras,
    )
    if disk is not None:
        disk.is_held_above = host.__contains__
    loader = AdapterLoader(
        source=catalog,
        disk=disk,
        write_pages=write_pages,
        write_slice=pool.write_slice if pool.device.type == "cpu" else None,
        allocate=catalog.rules.packing.allocate,
        executor=loads,
    )
    tiers = LowerTiers(catalog=catalog, host=host, disk=disk, loader=loader)

    def keep(image: AdapterImage) -> None:
        host.offer(image)
        if disk is not None:
            disk.offer(image)

    catalog.on_image = keep
    return tiers


def _page_cap(config: EngineConfig, pool: PagePool) -> int | None:
    if config.adapter_memory_fraction == 1:
        return None
    return int(pool.num_pages * config.adapter_memory_fraction)
