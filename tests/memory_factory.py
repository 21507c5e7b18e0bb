"""Tiny tiers of adapters whose loads happen when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loramux.adapters.catalog import KnownAdapter
from loramux.adapters.packed.dense import DenseLayout, Site, plan_dense
from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.packing import DensePacking
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.memory.disk_tier import DiskTier
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader
from loramux.memory.pages import PageAllocator
from loramux.memory.policies import EvictionPolicy, LruPolicy
from loramux.memory.pool import KVGeometry, PagePool
from loramux.memory.reclaim import Reclaimer
from loramux.memory.records import LowerTiers
from loramux.memory.residency import AdapterResidency

SITES = (Site(name="o", in_features=8, projections=("o_proj",), out_features=(8,)),)
PACKING = DensePacking(SITES, torch.float32)
# One rank of an adapter is one page: 16 elements of float32.
PAGE_ELEMENTS = 16
RANK_BYTES = 64


def layout_of_rank(rank: int) -> DenseLayout:
    return plan_dense(SITES, {(0, "o_proj"): rank})


def cid_of(number: int, rank: int = 1) -> str:
    """An id that says what the adapter is: its rank, and the number that fills it."""
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
    """A catalog of every adapter that cid_of can name, but for the unknown and the broken."""

    broken: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    unwritable: set[str] = field(default_factory=set)
    """Whose bytes the device does not take."""
    num_reads: int = 0

    def get(self, cid: str) -> KnownAdapter:
        if cid in self.unknown:
            raise AdapterNotFound(f"No adapter {cid}.")
        layout = layout_of_rank(facts_of(cid)[1])
        elements = layout.num_elements
        return KnownAdapter(cid, Path("/nowhere"), elements, 4 * elements, layout.max_rank, ())

    def read(self, cid: str) -> AdapterImage:
        if cid in self.broken:
            raise AdapterRefused("changed_on_disk", f"{cid} is broken")
        self.num_reads += 1
        return image_of(cid)


class ManualExecutor(Executor):
    """Runs a job when it is told to."""

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
    """Runs a job at once, so that tests take the same course every time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


class Clock:
    """One more at each look: what is evicted is the same on any machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class TinyMemory:
    pool: PagePool
    pages: PageAllocator
    room: Reclaimer
    tiers: LowerTiers
    residency: AdapterResidency
    executor: ManualExecutor
    adapters: NumberedAdapters

    @property
    def host(self) -> HostTier:
        return self.tiers.host

    def finish_loads(self) -> None:
        self.residency.poll()
        while self.executor.jobs:
            self.executor.run_all()
            self.residency.poll()

    def bring(self, *cids: str) -> None:
        """On the device, idle."""
        self.residency.want(cids)
        self.finish_loads()
        assert self.residency.is_ready(cids)
        self.residency.unwant(cids)

    def value(self, cid: str) -> float:
        """What fills the adapter's pages; fails when they differ."""
        page_ids = self.residency.resident[cid].page_ids
        out = torch.empty(len(page_ids) * PAGE_ELEMENTS)
        self.pool.read(page_ids, out)
        assert (out == out[0]).all()
        return float(out[0])

    def check(self, leases: dict[str, int] | None = None) -> None:
        self.residency.check_integrity(leases or {})
        self.room.check_integrity()
        self.pages.check_integrity(self.residency.claims())
        if self.tiers.disk is not None:
            self.tiers.disk.check_integrity()


def tiny_memory(
    *,
    num_pages: int,
    host_ranks: int = 64,
    disk: DiskTier | None = None,
    max_host: int | None = None,
    policy: EvictionPolicy | None = None,
) -> TinyMemory:
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
    pool = PagePool(
        num_pages=num_pages, geometry=geometry, dtype=torch.float32, device=torch.device("cpu")
    )
    pages = PageAllocator(num_pages)
    room = Reclaimer(pages)
    adapters = NumberedAdapters()
    executor = ManualExecutor()
    policy = policy or LruPolicy()

    def write_pages(page_ids: list[int], image: AdapterImage) -> None:
        if image.cid in adapters.unwritable:
            raise OSError(f"the device does not take {image.cid}")
        pool.write(page_ids, image.buffer)

    host = HostTier(
        budget_bytes=host_ranks * RANK_BYTES,
        policy=policy,
        cost_s=lambda cid, num_bytes: tiers.read_s(cid, num_bytes),
        max_adapters=max_host,
    )
    loader = AdapterLoader(source=adapters, disk=disk, write_pages=write_pages, executor=executor)
    tiers = LowerTiers(catalog=adapters, host=host, disk=disk, loader=loader)
    residency = AdapterResidency(
        pages=pages,
        room=room,
        tiers=tiers,
        policy=policy,
        pages_for=pool.pages_for_elements,
        clock=Clock(),
    )
    return TinyMemory(pool, pages, room, tiers, residency, executor, adapters)
