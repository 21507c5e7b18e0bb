"""Builds tiny memory tiers of adapters whose loads run when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from loramux.adapters.packed.dense import DenseLayout, plan_dense
from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.packing import DensePacking
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.memory.adapter_eviction import ResidencyLimits
from loramux.memory.cost import CostModel
from loramux.memory.disk_tier import DiskTier
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader
from loramux.memory.pages import PageAllocator
from loramux.memory.policies import EvictionPolicy, LruPolicy
from loramux.memory.pool import PagePool
from loramux.memory.prefix import PrefixCache, ReuseEstimator
from loramux.memory.reclaim import PageTier, Reclaimer
from loramux.memory.records import Placement, ResidentAdapter
from loramux.memory.residency import AdapterResidency, LowerTiers
from loramux.runner.rank_memory import RankMemory
from loramux.types.adapter import AdapterCard
from loramux.types.kv import KVLayout
from loramux.types.model import LinearSpec

SITES = (LinearSpec(name="o", in_features=8, projections=("o_proj",), out_features=(8,)),)
# One rank of an adapter is one page: 16 elements of float32.
PAGE_ELEMENTS = 16
RANK_BYTES = 4 * PAGE_ELEMENTS
PACKING = DensePacking(SITES, torch.float32, RANK_BYTES)


def layout_of_rank(rank: int) -> DenseLayout:
    return plan_dense(SITES, {(0, "o_proj"): rank})


def cid_of(number: int, rank: int = 1) -> str:
    """Return a CID that encodes the adapter's rank and the number that fills its weights."""
    return f"cidv1:sha256:{rank:04x}{number:060x}"


def facts_of(cid: str) -> tuple[int, int]:
    digits = cid.rpartition(":")[2]
    return int(digits[4:], 16), int(digits[:4], 16)


def image_of(cid: str) -> AdapterImage:
    number, rank = facts_of(cid)
    layout = layout_of_rank(rank)
    return AdapterImage(cid, layout, torch.full((layout.num_elements,), float(number)))


@dataclass
class NumberedAdapters:
    """A catalog of every adapter that cid_of can name, except unknown and broken ones."""

    broken: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    unwritable: set[str] = field(default_factory=set)
    """Adapters whose copy to the device fails."""
    num_reads: int = 0

    def get(self, cid: str) -> AdapterCard:
        if cid in self.unknown:
            raise AdapterNotFound(f"No adapter {cid}.")
        layout = layout_of_rank(facts_of(cid)[1])
        elements = layout.num_elements
        return AdapterCard(
            cid=cid,
            path="/nowhere",
            rank=layout.max_rank,
            num_bytes=4 * elements,
        )

    def read(self, cid: str) -> AdapterImage:
        if cid in self.broken:
            raise AdapterRefused("changed_on_disk", f"{cid} is broken")
        self.num_reads += 1
        return image_of(cid)


class ManualExecutor(Executor):
    """Runs a job when the test calls run_one() or run_all()."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], Any]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append(lambda: fn(*args, **kwargs))
        return Future()

    def run_one(self) -> None:
        self.jobs.popleft()()

    def run_all(self) -> None:
        while self.jobs:
            self.run_one()


class InlineExecutor(Executor):
    """Runs a job at once, so that tests are deterministic."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


class Clock:
    """Advances by one second at each call, so that evictions are deterministic."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Table(Protocol):
    """The executor's table of adapters, which a test watches."""

    def add(self, adapter: ResidentAdapter) -> None: ...

    def forget(self, cid: str) -> None: ...


class TinyRank(RankMemory):
    """The memory of an executor that computes no steps."""

    def __init__(self, num_pages: int, table: Table | None) -> None:
        pool = PagePool(num_pages, RANK_BYTES, torch.device("cpu"))
        kv = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
        super().__init__(pool, kv, adapter_dtype=torch.float32)
        self._table = table

    def add(self, adapter: ResidentAdapter) -> None:
        if self._table is not None:
            self._table.add(adapter)

    def forget(self, cid: str) -> None:
        if self._table is not None:
            self._table.forget(cid)


@dataclass
class TinyMemory:
    rank: TinyRank
    tier: PageTier
    tiers: LowerTiers
    residency: AdapterResidency
    executor: ManualExecutor
    adapters: NumberedAdapters
    prefixes: PrefixCache | None

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
    def host(self) -> HostTier:
        return self.tiers.host

    def finish_loads(self) -> None:
        self.residency.poll()
        while self.executor.jobs:
            self.executor.run_all()
            self.residency.poll()

    def bring(self, *cids: str) -> None:
        """Load adapters and leave them idle on the device."""
        self.residency.add_waiters(cids)
        self.finish_loads()
        assert self.residency.is_ready(cids)
        self.residency.remove_waiters(cids)

    def value(self, cid: str) -> float:
        """Return the number that fills the adapter's pages, which must be the same everywhere."""
        page_ids = self.residency.resident[cid].page_ids
        out = torch.empty(len(page_ids) * PAGE_ELEMENTS)
        self.rank.adapter_pages.read(page_ids, out)
        assert (out == out[0]).all()
        return float(out[0])

    def check(self, leases: dict[str, int] | None = None) -> None:
        self.residency.check_integrity(leases or {})
        self.reclaimer.check_integrity()
        self.pages.check_integrity(self.residency.claims())
        if self.tiers.disk is not None:
            self.tiers.disk.check_integrity()


MakeDisk = Callable[[Placement, CostModel], DiskTier]


def tiny_tier(
    num_pages: int,
    policy: EvictionPolicy,
    *,
    clock: Callable[[], float] | None = None,
    reuse: ReuseEstimator | None = None,
) -> PageTier:
    """Make an empty page tier; `reuse`: None for no penalty on prefixes that were used once."""
    pages = PageAllocator(num_pages)
    placement = Placement()
    reclaimer = Reclaimer(pages)
    if reuse is not None:
        reclaimer = Reclaimer(
            pages, single_use_penalty=lambda: policy.reuse_penalty(reuse.single_use_factor)
        )
    return PageTier(
        pages=pages,
        reclaimer=reclaimer,
        policy=policy,
        placement=placement,
        costs=CostModel(placement),
        clock=clock or Clock(),
    )


def disk_maker(
    folder: Path,
    *,
    budget_bytes: int = 2**20,
    policy: EvictionPolicy | None = None,
    disk_class: type[DiskTier] = DiskTier,
) -> MakeDisk:
    def make(placement: Placement, costs: CostModel) -> DiskTier:
        return disk_class(
            folder,
            budget_bytes=budget_bytes,
            packing=PACKING,
            policy=policy or LruPolicy(),
            placement=placement,
            costs=costs,
        )

    return make


def tiny_disk(folder: Path, **options: Any) -> DiskTier:
    """Make a disk tier that stands alone."""
    placement = Placement()
    return disk_maker(folder, **options)(placement, CostModel(placement))


def tiny_memory(  # noqa: PLR0913
    *,
    num_pages: int,
    host_ranks: int = 64,
    make_disk: MakeDisk | None = None,
    max_host: int | None = None,
    policy: EvictionPolicy | None = None,
    limits: ResidencyLimits | None = None,
    table: Table | None = None,
    prefix_block_tokens: int | None = None,
    has_single_use_penalty: bool = True,
) -> TinyMemory:
    """`prefix_block_tokens`: None for no prefix cache."""
    rank = TinyRank(num_pages, table)
    adapters = NumberedAdapters()
    executor = ManualExecutor()
    policy = policy or LruPolicy()
    reuse = ReuseEstimator(num_pages)
    tier = tiny_tier(num_pages, policy, reuse=reuse if has_single_use_penalty else None)

    def write_pages(page_ids: list[int], image: AdapterImage) -> None:
        if image.cid in adapters.unwritable:
            raise OSError(f"the device does not take {image.cid}")
        rank.write_adapter(page_ids, image)

    host = HostTier(
        budget_bytes=host_ranks * RANK_BYTES,
        policy=policy,
        placement=tier.placement,
        costs=tier.costs,
        max_adapters=max_host,
    )
    disk = None if make_disk is None else make_disk(tier.placement, tier.costs)
    loader = AdapterLoader(source=adapters, disk=disk, write_pages=write_pages, executor=executor)
    lower = LowerTiers(catalog=adapters, host=host, disk=disk, loader=loader)
    prefixes = None
    if prefix_block_tokens is not None:
        prefixes = PrefixCache(tier, reuse=reuse, block_tokens=prefix_block_tokens)
    residency = AdapterResidency(
        tier,
        memory=rank,
        lower=lower,
        limits=limits,
        prefixes=prefixes,
    )
    return TinyMemory(rank, tier, lower, residency, executor, adapters, prefixes)
