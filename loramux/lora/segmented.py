"""Segmented (SGMV) LoRA: the directory of resident adapters, and the work lists of steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loramux.adapters.packed.paged import RankBlockLayout, RankBlockTable, tabulate, uses_fp12
from loramux.errors import DoesNotFit
from loramux.kernels.gpu.lora.tables import (
    PREFILL_LAUNCH,
    SMALL_ROWS,
    LaunchShape,
    LoraTables,
    decode_launch,
    make_tables,
)
from loramux.kernels.gpu.lora.work_list import (
    BASE,
    RankBlockDirectory,
    RowTiles,
    SiteShape,
    WorkLimits,
    WorkListFull,
    build_work_list,
    gather_tiles,
    plain_tiles,
)
from loramux.kernels.gpu.transfer import send
from loramux.kernels.ops import SegmentedLoraOps
from loramux.lora.device_extras import DeviceExtras
from loramux.memory.records import ResidentAdapter
from loramux.types.model import LinearSpec
from loramux.types.request import Selection

Ints = NDArray[np.int32]
LayoutKey = tuple[tuple[int, str, int], ...]
"""(layer, projection, rank) of everything that an adapter changes."""

# Work items of decode graphs (steps with more run without a graph) and of prefill (tables grow).
_DECODE_ITEMS = 1024
_PREFILL_ITEMS = 2048
# Average rank blocks of a row before tables grow.
_BLOCKS_PER_ROW = 8
_MAX_FOUND = 4096


class DeviceDirectory:
    """Addresses of every resident adapter's rank blocks, in tensors that kernels read."""

    def __init__(
        self,
        sites: Sequence[LinearSpec],
        *,
        num_layers: int,
        max_adapters: int,
        max_blocks: int,
        device: torch.device,
        extras: DeviceExtras | None = None,
    ) -> None:
        """`extras`: the extras of adapters; None: no adapter has any."""
        self.sites = tuple(sites)
        self.extras = extras
        self._projections = [name for site in sites for name in site.projections]
        self._num_layers = num_layers
        self.max_adapters = max_adapters
        self.blocks = RankBlockDirectory(max_slots=max_adapters, max_blocks=max_blocks)
        self.addresses = torch.zeros(num_layers, max_blocks, 4, dtype=torch.int32, device=device)
        self.slots = torch.zeros(self.blocks.slots.shape, dtype=torch.int32, device=device)
        self._slot_of: dict[str, int] = {}
        # Results of slots_of, which is called twice per row and step; cleared when adapters move.
        self._found: dict[Selection, tuple[tuple[int, float], ...]] = {}
        # Most adapters of a server share a layout.
        self._tables: dict[LayoutKey, RankBlockTable] = {}

    def slots_of(self, selection: Selection) -> tuple[tuple[int, float], ...]:
        """(slot, weight) of each adapter of the selection."""
        found = self._found.get(selection)
        if found is None:
            found = tuple((self._slot_of[cid], weight) for cid, weight in selection)
            if len(self._found) >= _MAX_FOUND:
                self._found.clear()
            self._found[selection] = found
        return found

    def order(self, selection: Selection) -> tuple[bool, tuple[tuple[int, float], ...]]:
        """Sort key that makes sequences of one selection adjacent, base rows last."""
        return not selection, self.slots_of(selection)

    def __contains__(self, cid: str) -> bool:
        return cid in self._slot_of

    def add(self, adapter: ResidentAdapter) -> None:
        """Add an adapter; raise DoesNotFit when the tables are full."""
        layout = adapter.layout
        assert isinstance(layout, RankBlockLayout)
        table = self._tables.get(layout.key)
        if table is None:
            table = tabulate(layout, projections=self._projections, num_layers=self._num_layers)
            self._tables[layout.key] = table
        try:
            slot, start = self.blocks.add(table.blocks_per_projection)
        except WorkListFull as error:
            raise DoesNotFit(str(error)) from error
        if layout.extras.places:
            self._add_extras(adapter, slot)
        self._slot_of[adapter.cid] = slot
        self._found.clear()
        entries = send(torch.from_numpy(table.addresses(adapter.page_ids)), self.slots.device)
        self.addresses[:, start : start + entries.shape[1]].copy_(entries)
        self.slots[slot].copy_(send(torch.from_numpy(self.blocks.slots[slot]), self.slots.device))

    def _add_extras(self, adapter: ResidentAdapter, slot: int) -> None:
        assert self.extras is not None, "the directory has no tables for parts beside low rank"
        try:
            self.extras.add(adapter)
        except DoesNotFit:
            self.blocks.remove(slot)
            raise

    def remove(self, cid: str) -> int | None:
        """Remove an adapter; return the slot that it had, None if it had none."""
        slot = self._slot_of.pop(cid, None)
        if slot is not None:
            self.blocks.remove(slot)
            if self.extras is not None:
                self.extras.remove(cid)
            self._found.clear()
        return slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDevice:
    """Kernels, directory and page pool of one device."""

    kernels: SegmentedLoraOps
    directory: DeviceDirectory
    num_layers: int
    pool: Tensor
    num_sms: int

    @property
    def is_fp12(self) -> bool:
        """Whether adapters have their A in fp12 on this device."""
        widths = (site.in_features for site in self.directory.sites)
        return uses_fp12(widths, self.pool.dtype, self.pool.shape[1])

    def tables(self, limits: WorkLimits, launch: LaunchShape) -> LoraTables:
        shapes = [
            SiteShape(site.name, site.in_features, site.out_features)
            for site in self.directory.sites
        ]
        return make_tables(
            shapes,
            num_layers=self.num_layers,
            limits=limits,
            launch=replace(launch, is_fp12=self.is_fp12),
            device=self.pool.device,
            num_sms=self.num_sms,
        )


class SegmentedWork:
    """Device tables of one kind of step, refilled for each step; called by the layers."""

    def __init__(
        self, device: LoraDevice, tables: LoraTables, sites: Collection[str] | None = None
    ) -> None:
        """sites: names of the fused linears that steps may change; None: all."""
        self._device = device
        self.tables = tables
        self._sites = sites

    @property
    def directory(self) -> DeviceDirectory:
        return self._device.directory

    @property
    def kernels(self) -> SegmentedLoraOps:
        return self._device.kernels

    @property
    def pool(self) -> Tensor:
        return self._device.pool

    def read_from(self, words: Tensor) -> None:
        """Use part of a larger buffer as the work list."""
        self.tables = replace(self.tables, work=words)

    def at_sites(self, sites: Collection[str]) -> SegmentedWork:
        """Return the same tables for steps whose adapters change these sites alone."""
        return SegmentedWork(self._device, self.tables, sites)

    def covers(self, site: int) -> bool:
        """Whether a step may change the site; if not, no LoRA kernel is launched there."""
        return self._sites is None or self.tables.sites[site].shape.name in self._sites

    def fill(self, selections: Sequence[Selection], num_rows: Sequence[int], out: Ints) -> int:
        """Write the work list into `out`; return the number of words. Raises WorkListFull."""
        directory, limits = self._device.directory, self.tables.limits
        slots = [directory.slots_of(selection) for selection in selections]
        tiles = _tiles(slots, num_rows, limits.tile_rows)
        return build_work_list(tiles, directory.blocks, limits, out)

    def fill_now(self, selections: Sequence[Selection], num_rows: Sequence[int]) -> None:
        """Write and resolve the step's work list on the device, growing the tables if needed."""
        while True:
            limits = self.tables.limits
            words = np.empty(limits.num_words, dtype=np.int32)
            try:
                used = self.fill(selections, num_rows, words)
                break
            except WorkListFull:
                self.tables = self._device.tables(_wider(limits), self.tables.launch)
        listed = send(torch.from_numpy(words[:used]), self.tables.work.device)
        self.tables.work[:used].copy_(listed)
        self.resolve()

    def resolve(self) -> None:
        """Launch the first kernel of a step, after the work list was copied to the device."""
        device = self._device
        device.kernels.resolve(self.tables, device.directory.addresses, device.directory.slots)

    def shrink(self, x: Tensor, layer: int, site: int) -> None:
        self._device.kernels.shrink(self.tables, self._device.pool, x, layer, site)

    def expand(self, y: Tensor, layer: int, site: int) -> None:
        self._device.kernels.expand(self.tables, self._device.pool, y, layer, site)

    def expand_swiglu(self, y: Tensor, activation: str, layer: int, site: int) -> Tensor:
        return self._device.kernels.expand_swiglu(
            self.tables, self._device.pool, y, activation, layer, site
        )


def decode_work(device: LoraDevice, max_rows: int, *, use_pdl: bool) -> SegmentedWork:
    """Tables of decode graphs."""
    limits = _graph_limits(device, _DECODE_ITEMS, max_rows)
    return SegmentedWork(device, device.tables(limits, decode_launch(use_pdl=use_pdl)))


def prefill_graph_work(device: LoraDevice, max_rows: int, *, use_pdl: bool) -> SegmentedWork:
    """Tables of graphs with prefill: their kernels take single rows and tiles."""
    limits = _graph_limits(device, _PREFILL_ITEMS, max_rows)
    return SegmentedWork(device, device.tables(limits, decode_launch(use_pdl=use_pdl)))


def prefill_work(device: LoraDevice, max_rows: int) -> SegmentedWork:
    """Tables of steps with prefill that run without a graph: tiles only."""
    limits = WorkLimits(max_items=_PREFILL_ITEMS, max_h_rows=_BLOCKS_PER_ROW * max_rows, few_rows=0)
    return SegmentedWork(device, device.tables(limits, PREFILL_LAUNCH))


def _graph_limits(device: LoraDevice, max_items: int, max_rows: int) -> WorkLimits:
    return WorkLimits(
        max_items=max_items,
        max_h_rows=_BLOCKS_PER_ROW * max_rows,
        small_rows=SMALL_ROWS if device.is_fp12 else 0,
        max_rows=max_rows,
    )


def _wider(limits: WorkLimits) -> WorkLimits:
    return replace(limits, max_items=2 * limits.max_items, max_h_rows=2 * limits.max_h_rows)


def _tiles(
    slots: Sequence[tuple[tuple[int, float], ...]], num_rows: Sequence[int], tile_rows: int
) -> RowTiles:
    is_plain = all(len(s) == 0 or (len(s) == 1 and s[0][1] == 1.0) for s in slots)
    if is_plain and len(slots) == sum(num_rows):
        single = [s[0][0] if s else BASE for s in slots]
        ids = np.array(single, dtype=np.int32)
        return plain_tiles(ids, tile_rows, keeps_base=True)
    return gather_tiles(slots, num_rows, tile_rows, keeps_base=True)
