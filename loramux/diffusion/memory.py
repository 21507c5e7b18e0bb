"""The memory of an image engine for adapters: device, host memory, disk, and their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loramux.adapters.packed.image import AdapterImage
from loramux.config.engine import (
    CPU_HOST_MEMORY_BYTES,
    GPU_HOST_MEMORY_DIVISOR,
    EvictionName,
)
from loramux.config.fields import AUTO
from loramux.config.images import ADAPTER_MEMORY_BYTES
from loramux.diffusion.catalog import ImageCatalog, ReadAdapter
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.diffusion.packing import PAGE_BYTES, ImagePacking
from loramux.diffusion.rows import RowLora
from loramux.memory.adapter_eviction import ResidencyLimits
from loramux.memory.cost import CostModel
from loramux.memory.device import Fence, StreamCopier, host_buffer
from loramux.memory.disk_tier import DiskTier
from loramux.memory.host_memory import available_memory_bytes
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader
from loramux.memory.pages import PageAllocator
from loramux.memory.policies import make_policy
from loramux.memory.reclaim import PageTier, Reclaimer
from loramux.memory.records import Placement, ResidentAdapter
from loramux.memory.residency import AdapterResidency, LowerTiers


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Budgets of the tiers."""

    device_bytes: int = ADAPTER_MEMORY_BYTES
    host_bytes: int | str = AUTO
    disk_folder: Path | None = None
    disk_bytes: int = 0
    eviction: EvictionName = "cost"
    page_bytes: int = PAGE_BYTES

    def host_budget(self, device: torch.device) -> int:
        if isinstance(self.host_bytes, int):
            return self.host_bytes
        if device.type == "cpu":
            return CPU_HOST_MEMORY_BYTES
        return available_memory_bytes() // GPU_HOST_MEMORY_DIVISOR


class DeviceAdapters:
    """The weights of the adapters on the device, attached to the components that they change.

    The pages of an adapter are its part of the budget. Its weights are one buffer of their own, so
    that each matrix is a tensor; on a CPU it is the buffer of the host tier.
    """

    def __init__(
        self, packing: ImagePacking, lora: Mapping[str, RowLora], device: torch.device
    ) -> None:
        self._packing = packing
        self._lora = lora
        self._device = device
        self._copier = StreamCopier(device) if device.type == "cuda" else None
        self._written: dict[str, Tensor] = {}
        """Copied, and not attached yet."""
        self._attached: dict[str, tuple[str, ...]] = {}
        """The components of each adapter."""

    @property
    def page_bytes(self) -> int:
        return self._packing.dense.page_bytes

    def fence(self, page_ids: list[int]) -> None:
        """Do nothing: no buffer is written again after its first use."""

    def write(self, image: AdapterImage) -> None:
        """Copy an image to the device; called on the loader's threads."""
        if self._copier is None:
            self._written[image.cid] = image.buffer
            return
        target = torch.empty_like(image.buffer, device=self._device)
        # Its memory may have been freed by work that the device has not done yet.
        self._copier.copy([(target, image.buffer)], after=Fence(self._device))
        self._written[image.cid] = target

    def add(self, adapter: ResidentAdapter) -> None:
        buffer = self._written.pop(adapter.cid)
        components = self._packing.unpack(adapter.layout, buffer)
        for component, modules in components.items():
            self._lora[component].add(adapter.cid, modules)
        self._attached[adapter.cid] = tuple(components)

    def forget(self, cid: str) -> None:
        for component in self._attached.pop(cid):
            self._lora[component].remove(cid)

    def check_integrity(self, resident: Mapping[str, ResidentAdapter]) -> None:
        assert self._attached.keys() == resident.keys(), "an adapter is attached without pages"
        for name, lora in self._lora.items():
            found = {cid for cid, parts in self._attached.items() if name in parts}
            assert lora.cids == found, f"{name} has other adapters than it should"


class InlineExecutor(Executor):
    """Runs work at once, for engines without threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMemory:
    """The tiers of an image engine's adapters; the step loop's thread calls it."""

    options: MemoryOptions
    tier: PageTier
    catalog: ImageCatalog
    tiers: LowerTiers
    residency: AdapterResidency
    device: DeviceAdapters

    @property
    def placement(self) -> Placement:
        return self.tier.placement

    @property
    def clock(self) -> Callable[[], float]:
        return self.tier.clock

    def move_adapters(self) -> None:
        """Take loads that have ended and starts new ones; called once per step."""
        # The second time for loads that have ended at once.
        for _ in range(2):
            self.residency.poll()

    def admit(self, found: ReadAdapter) -> None:
        """Register an adapter; keep its image in host memory for its first load."""
        self.catalog.adopt(found.card)
        self.residency.admit(found.image, found.read_s)

    def write_disk(self, found: ReadAdapter) -> None:
        """Write the image of an adapter to the disk tier; any thread may call it."""
        if self.tiers.disk is not None:
            self.tiers.disk.put(found.image)

    def forget(self, cid: str) -> bool:
        """Frees everything that an adapter holds; returns False if it is in use."""
        if not self.residency.forget(cid):
            return False
        self.catalog.forget(cid)
        return True

    def close(self) -> None:
        self.tiers.loader.close()

    def check_integrity(self, leases: Mapping[str, int]) -> None:
        self.residency.check_integrity(leases)
        self.tier.reclaimer.check_integrity()
        self.tier.pages.check_integrity(self.residency.claims())
        self.device.check_integrity(self.placement.device)
        if self.tiers.disk is not None:
            self.tiers.disk.check_integrity()


def build_memory(
    options: MemoryOptions,
    names: PipelineNames,
    lora: Mapping[str, RowLora],
    *,
    dtype: torch.dtype,
    device: torch.device,
    loads: Executor,
) -> ImageMemory:
    """Build the memory; `loads` runs the loads."""
    packing = ImagePacking(
        names.targets, dtype, page_bytes=options.page_bytes, allocate=host_buffer(device)
    )
    num_pages = max(1, options.device_bytes // options.page_bytes)
    host_bytes = options.host_budget(device)
    max_bytes = min(num_pages * options.page_bytes, host_bytes)
    catalog = ImageCatalog(names, packing, max_bytes=max_bytes)
    placement = Placement()
    pages = PageAllocator(num_pages)
    tier = PageTier(
        pages=pages,
        reclaimer=Reclaimer(pages),
        policy=make_policy(options.eviction),
        placement=placement,
        costs=CostModel(placement),
        clock=time.monotonic,
    )
    table = DeviceAdapters(packing, lora, device)
    disk = _disk_tier(options, packing, tier)
    host = HostTier(
        budget_bytes=host_bytes,
        policy=make_policy(options.eviction, is_lower_tier=True),
        placement=placement,
        costs=tier.costs,
    )
    loader = AdapterLoader(
        source=catalog,
        disk=disk,
        write_pages=lambda page_ids, image: table.write(image),
        allocate=packing.dense.allocate,
        executor=loads,
    )
    lower = LowerTiers(catalog=catalog, host=host, disk=disk, loader=loader)
    residency = AdapterResidency(
        tier,
        memory=table,
        lower=lower,
        limits=ResidencyLimits(max_pages=num_pages),
    )
    return ImageMemory(
        options=options,
        tier=tier,
        catalog=catalog,
        tiers=lower,
        residency=residency,
        device=table,
    )


def _disk_tier(options: MemoryOptions, packing: ImagePacking, tier: PageTier) -> DiskTier | None:
    """Return the tier of packed adapters on disk; None: there is no folder or space for it."""
    if options.disk_folder is None or options.disk_bytes <= 0:
        return None
    return DiskTier(
        options.disk_folder,
        budget_bytes=options.disk_bytes,
        packing=packing.dense,
        policy=make_policy(options.eviction, is_lower_tier=True),
        placement=tier.placement,
        costs=tier.costs,
    )
