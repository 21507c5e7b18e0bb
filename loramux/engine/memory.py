"""Builds the engine's memory: pages, adapter tiers and the prefix cache."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from loramux.adapters.catalog import AdapterCatalog, IdentifiedAdapter, VerifiedAdapters
from loramux.adapters.identity import FileDigest, is_digest
from loramux.adapters.loading import AdapterRules
from loramux.adapters.packed.compiled import use_packer
from loramux.adapters.workers import Workers
from loramux.config.engine import ResolvedConfig
from loramux.engine.executor import ExecutorMemory
from loramux.kernels.select import select_fp12_packer
from loramux.memory.adapter_eviction import ResidencyLimits
from loramux.memory.cost import CostModel
from loramux.memory.disk_tier import DiskTier
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader, load_workers
from loramux.memory.pages import PageAllocator
from loramux.memory.policies import make_policy
from loramux.memory.prefix import PrefixCache, ReuseEstimator
from loramux.memory.reclaim import PageTier, Reclaimer
from loramux.memory.records import Placement
from loramux.memory.residency import AdapterResidency, LowerTiers
from loramux.store.files import find_record

Clock = Callable[[], float]
# Upper bounds, in seconds, of the histogram of step time spent on loads.
STALL_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(slots=True)
class StallHistogram:
    """Counts steps by the time that the step loop itself spent on loads."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STALL_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(STALL_BUCKETS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The owners of the executor's pages: sequences, adapters and cached prefixes."""

    rank: ExecutorMemory
    tier: PageTier
    catalog: AdapterCatalog
    tiers: LowerTiers
    residency: AdapterResidency
    prefixes: PrefixCache | None
    stalls: StallHistogram = field(default_factory=StallHistogram)

    @property
    def pages(self) -> PageAllocator:
        return self.tier.pages

    @property
    def reclaimer(self) -> Reclaimer:
        return self.tier.reclaimer

    @property
    def placement(self) -> Placement:
        return self.tier.placement

    @property
    def costs(self) -> CostModel:
        return self.tier.costs

    @property
    def clock(self) -> Clock:
        return self.tier.clock

    def move_adapters(self) -> None:
        """Take loads that have ended and starts new ones; called once per step."""
        began = time.perf_counter()
        if self.residency.poll():
            self.stalls.add(time.perf_counter() - began)

    def identify(self, folder: Path) -> IdentifiedAdapter:
        """Read, check and pack an adapter; called on other threads than the step loop's."""
        return self.catalog.identify(folder)

    def admit(self, found: IdentifiedAdapter) -> None:
        """Register an identified adapter; keep its image in host memory for its first load."""
        self.catalog.adopt(found.card)
        if found.loaded is not None:
            self.residency.admit(found.loaded.image, found.loaded.times.total_s)

    def write_disk(self, found: IdentifiedAdapter) -> None:
        """Write the image of an identified adapter to the disk tier; any thread may call it."""
        if found.loaded is not None and self.tiers.disk is not None:
            self.tiers.disk.put(found.loaded.image)

    def forget(self, cid: str) -> bool:
        """Frees everything that an adapter holds; returns False if it is in use."""
        if not self.residency.forget(cid):
            return False
        self.catalog.forget(cid)
        return True

    def close(self) -> None:
        self.tiers.loader.close()
        self.catalog.close()


def build_memory(
    config: ResolvedConfig,
    rules: AdapterRules,
    rank: ExecutorMemory,
    *,
    clock: Clock,
    loads: Executor | None = None,
) -> EngineMemory:
    """Build the memory of an engine; `loads` runs the loads, None for loader threads."""
    policy = make_policy(config.eviction)
    pages = PageAllocator(rank.num_pages)
    reuse = ReuseEstimator(rank.num_pages)
    placement = Placement()
    tier = PageTier(
        pages=pages,
        reclaimer=Reclaimer(
            pages, single_use_penalty=lambda: policy.reuse_penalty(reuse.single_use_factor)
        ),
        policy=policy,
        placement=placement,
        costs=CostModel(placement),
        clock=clock,
    )
    workers = load_workers(shares_cores=rank.device.type == "cpu")
    if workers.num_threads > 1:
        # Takes a second, or three at the first start; numpy packs until then.
        workers.start(lambda: use_packer(select_fp12_packer()))
    catalog = _catalog(config, rules, workers)
    lower = _lower_tiers(config, rank, catalog, tier, loads)
    prefixes = None
    if config.prefix_cache:
        prefixes = PrefixCache(tier, reuse=reuse, block_tokens=config.block_tokens)
    residency = AdapterResidency(
        tier,
        memory=rank,
        lower=lower,
        limits=_limits(config, rank),
        prefixes=prefixes,
    )
    return EngineMemory(
        rank=rank,
        tier=tier,
        catalog=catalog,
        tiers=lower,
        residency=residency,
        prefixes=prefixes,
    )


def _catalog(config: ResolvedConfig, rules: AdapterRules, workers: Workers) -> AdapterCatalog:
    folder = None
    if config.disk_folder is not None:
        folder = _disk_folder(config.disk_folder, rules) / rules.packing.fingerprint[:16]
    return AdapterCatalog(
        rules,
        find_digests=_stored_digests,
        verified=VerifiedAdapters(folder),
        workers=workers,
    )


def _disk_folder(folder: str, rules: AdapterRules) -> Path:
    """Return where images that were packed by these rules lie."""
    found = Path(folder).expanduser()
    return found if rules.folded is None else found / f"folded-{rules.folded.digest[:16]}"


def _stored_digests(folder: Path) -> Mapping[str, FileDigest] | None:
    # Folders that a store made are named by a digest; all others are told apart without a call.
    record = find_record(folder) if is_digest(folder.name) else None
    return None if record is None else record.covered_files


def _lower_tiers(
    config: ResolvedConfig,
    rank: ExecutorMemory,
    catalog: AdapterCatalog,
    tier: PageTier,
    loads: Executor | None,
) -> LowerTiers:
    disk = None
    if config.disk_folder is not None and config.disk_space_bytes > 0:
        disk = DiskTier(
            _disk_folder(config.disk_folder, catalog.rules),
            budget_bytes=config.disk_space_bytes,
            packing=catalog.rules.packing,
            policy=make_policy(config.eviction, is_lower_tier=True),
            placement=tier.placement,
            costs=tier.costs,
        )
    host = HostTier(
        budget_bytes=config.host_memory_bytes,
        policy=make_policy(config.eviction, is_lower_tier=True),
        placement=tier.placement,
        costs=tier.costs,
        max_adapters=config.max_cpu_loras,
    )
    loader = AdapterLoader(
        source=catalog,
        disk=disk,
        write_pages=rank.write_adapter,
        write_slice=rank.write_slice if rank.device.type == "cpu" else None,
        allocate=catalog.rules.packing.allocate,
        executor=loads,
    )
    return LowerTiers(catalog=catalog, host=host, disk=disk, loader=loader)


def _limits(config: ResolvedConfig, rank: ExecutorMemory) -> ResidencyLimits:
    max_pages = None
    if config.adapter_memory_fraction != 1:
        max_pages = int(rank.num_pages * config.adapter_memory_fraction)
    caps = [config.max_active_adapters, rank.max_adapters]
    return ResidencyLimits(
        max_pages=max_pages, max_adapters=min((c for c in caps if c is not None), default=None)
    )
