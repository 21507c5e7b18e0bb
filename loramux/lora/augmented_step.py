"""Decode steps whose adapters are all in the tail: their work list, and what a site is told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import numpy as np
from torch import Tensor

from loramux.kernels.gpu.lora.tables import LoraTables
from loramux.kernels.gpu.lora.work_list import (
    BASE,
    GROUP_RANKS,
    RowTiles,
    WorkListFull,
    build_work,
    gather_tiles,
    map_rows,
    plain_tiles,
)
from loramux.kernels.gpu.lora_augmented.tables import TailLaunch, TailSite, make_store, tail_launch
from loramux.lora.augmented import AdapterTail
from loramux.lora.segmented import Ints, LoraWork
from loramux.types.request import Selection


class TailWidth(Enum):
    """How much of the tail a step's products compute."""

    WHOLE = auto()
    NARROW = auto()


class TailWork:
    """Shares the tables of steps without a tail: a list is in one of the two shapes."""

    def __init__(
        self,
        work: LoraWork,
        tail: AdapterTail,
        launch_of: Callable[[int], TailLaunch] = tail_launch,
        width: TailWidth = TailWidth.WHOLE,
    ) -> None:
        self._work = work
        self._tail = tail
        self.launch_of = launch_of
        """By the number of rows that a graph has."""
        self._width = width

    def warm_up(self) -> None:
        """Before there are adapters: no step waits for a compiler."""
        self._tail.warm_up()

    def over(self, work: LoraWork) -> TailWork:
        """The same tail for another kind of step, with tables of its own."""
        return TailWork(work, self._tail, self.launch_of, self._width)

    def of_width(self, width: TailWidth) -> TailWork:
        return TailWork(self._work, self._tail, self.launch_of, width)

    def has_narrow(self, num_rows: int) -> bool:
        """Are there two widths of steps of so many rows?"""
        launch = self._launch(num_rows)
        return launch.narrow_blocks is not None and launch.narrow_blocks < launch.max_blocks

    def at_sites(self, sites: Collection[int]) -> TailWork:
        """The same, for steps whose adapters change nothing elsewhere."""
        return self.over(self._work.at_sites(sites))

    def fill(
        self,
        selections: Sequence[Selection],
        lengths: Sequence[int],
        num_rows: int,
        out: Ints,
    ) -> TailWidth | None:
        """Writes the list of a graph of num_rows rows; None: this is not a step for it.

        lengths[i]: rows of selections[i]; what is left is padding.
        """
        directory = self._work.directory
        slots = [directory.slots_of(selection) for selection in selections]
        launch = self._launch(num_rows)
        width = self._place({slot for pairs in slots for slot, _ in pairs}, num_rows)
        if width is None:
            return None
        limits = self._tables(launch).limits
        tiles = _tiles([*slots, ()], [*lengths, num_rows - sum(lengths)], launch)
        try:
            build_work(tiles, directory.groups, limits, out, self._tail.blocks)
        except WorkListFull:
            return None
        map_rows(limits, out)
        return width

    def _place(self, slots: Collection[int], num_rows: int) -> TailWidth | None:
        launch, tail = self._launch(num_rows), self._tail
        narrow = launch.narrow_blocks
        if narrow is None or not self.has_narrow(num_rows) or tail.num_needed(slots) > narrow:
            return TailWidth.WHOLE if tail.place(slots, launch.max_blocks) else None
        if tail.place(slots, narrow):
            return TailWidth.NARROW
        # They move when they have been asked for once more.
        return TailWidth.WHOLE if tail.is_within(slots, launch.max_blocks) else None

    def for_decodes(self, num_rows: int) -> TailStep:
        launch = self._launch(num_rows)
        if self._width is TailWidth.NARROW and launch.narrow_blocks is not None:
            launch = replace(launch, max_blocks=launch.narrow_blocks)
        return TailStep(self._work, self._tables(launch), launch)

    def _launch(self, num_rows: int) -> TailLaunch:
        """With no more blocks than there are."""
        launch = self.launch_of(num_rows)
        return replace(launch, max_blocks=min(launch.max_blocks, self._tail.num_blocks))

    def _tables(self, launch: TailLaunch) -> LoraTables:
        """Where every row is in a tile, a row alone is a tile too."""
        tables = self._work.tables
        if launch.tile_rows > 1:
            limits = replace(tables.limits, alone_rows=0, tile_rows=launch.tile_rows)
            return replace(tables, limits=limits)
        return tables


def tail_work(
    work: LoraWork, tails: Sequence[Sequence[Tensor]] | None, kernels: Any
) -> TailWork | None:
    """tails [layers][sites] of [blocks, slices, 16, in]; None: the weights have none."""
    if tails is None:
        return None
    store = make_store(tails, work.pool, is_short=work.tables.is_short)
    return TailWork(work, AdapterTail(kernels, store, work.directory, work.pool))


class TailStep:
    """What the runner's layers call in one graph."""

    def __init__(self, work: LoraWork, tables: LoraTables, launch: TailLaunch) -> None:
        self._work = work
        self._tables = tables
        self.launch = launch

    def resolve(self) -> None:
        self._work.resolve()

    def covers(self, site: int) -> bool:
        """Whether a step may change the site; if not, its product has no tail."""
        return self._work.covers(site)

    def at(self, layer: int, site: int) -> TailSite:
        return TailSite(self._tables, self._work.pool, self.launch, layer, site)

    def num_tail_rows(self, site: int) -> int:
        """Of a site's weight: what the step's product computes beside its outputs."""
        num_slices = len(self._tables.sites[site].shape.out_features)
        return self.launch.max_blocks * num_slices * GROUP_RANKS


def _tiles(
    slots: Sequence[tuple[tuple[int, float], ...]], lengths: Sequence[int], launch: TailLaunch
) -> RowTiles:
    if all(len(pairs) == 0 or (len(pairs) == 1 and pairs[0][1] == 1.0) for pairs in slots):
        single = np.array([pairs[0][0] if pairs else BASE for pairs in slots], dtype=np.int32)
        return plain_tiles(np.repeat(single, lengths), launch.tile_rows, keeps_base=True)
    return gather_tiles(slots, lengths, launch.tile_rows, keeps_base=True)
