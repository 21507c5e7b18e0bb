"""Steps whose adapters all have their A in augmented weights: work list and layer calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from loramux.kernels.gpu.lora.tables import LoraTables
from loramux.kernels.gpu.lora.work_list import (
    BASE,
    RANK_BLOCK,
    RowTiles,
    WorkListFull,
    build_work_list,
    gather_tiles,
    map_rows,
    plain_tiles,
)
from loramux.kernels.gpu.lora_augmented.tables import (
    AugmentedLaunch,
    AugmentedSite,
    augmented_launch,
    make_augmented_weights,
)
from loramux.kernels.ops import AugmentedLoraOps
from loramux.lora.augmented import AugmentedCache
from loramux.lora.segmented import Ints, SegmentedWork
from loramux.types.request import Selection


class AugmentedWork:
    """Fills the work list of the segmented path's tables for steps on augmented weights."""

    def __init__(
        self,
        work: SegmentedWork,
        cache: AugmentedCache,
        launch_of: Callable[[int], AugmentedLaunch] = augmented_launch,
    ) -> None:
        self._work = work
        self.cache = cache
        self.launch_of = launch_of
        """Launch parameters by the number of rows of a graph."""

    def warm_up(self) -> None:
        """Compiles the copy kernel before there are adapters, so that no step waits for it."""
        self.cache.warm_up()

    def over(self, work: SegmentedWork) -> AugmentedWork:
        """Return the same cache over the tables, and the sites, of another kind of step."""
        return AugmentedWork(work, self.cache, self.launch_of)

    def narrow_blocks(self, num_rows: int) -> int | None:
        """Return the smaller number of rank blocks that a step may compute; None: there is no
        choice.
        """
        launch = self._launch(num_rows)
        narrow = launch.narrow_blocks
        return narrow if narrow is not None and narrow < launch.max_blocks else None

    def fill(
        self,
        selections: Sequence[Selection],
        lengths: Sequence[int],
        num_rows: int,
        out: Ints,
    ) -> int | None:
        """Write the work list of a graph of num_rows rows; None: not all adapters are augmented.

        Returns the number of rank blocks that the step's GEMMs must compute. Selection i applies to
        the next lengths[i] rows; the remaining rows are padding.
        """
        directory = self._work.directory
        slots = [directory.slots_of(selection) for selection in selections]
        launch = self._launch(num_rows)
        num_blocks = self._place({slot for pairs in slots for slot, _ in pairs}, num_rows)
        if num_blocks is None:
            return None
        limits = self._tables(launch).limits
        tiles = _tiles([*slots, ()], [*lengths, num_rows - sum(lengths)], launch)
        try:
            build_work_list(tiles, directory.blocks, limits, out, self.cache.blocks)
        except WorkListFull:
            return None
        map_rows(limits, out)
        return num_blocks

    def _place(self, slots: Collection[int], num_rows: int) -> int | None:
        """Brings the adapters into as few leading rank blocks as a graph has a mode for."""
        cache, max_blocks = self.cache, self._launch(num_rows).max_blocks
        narrow = self.narrow_blocks(num_rows)
        if narrow is None or cache.num_needed(slots) > narrow:
            return max_blocks if cache.place(slots, max_blocks) else None
        if cache.place(slots, narrow):
            return narrow
        # They move to the leading blocks when the next steps need them, too.
        return max_blocks if cache.is_within(slots, max_blocks) else None

    def step(self, num_rows: int, num_blocks: int | None = None) -> AugmentedStep:
        """Return what the layers of a graph call; num_blocks: fewer than the launch's."""
        launch = self._launch(num_rows)
        if num_blocks is not None:
            launch = replace(launch, max_blocks=num_blocks)
        return AugmentedStep(self._work, self._tables(launch), launch)

    def _launch(self, num_rows: int) -> AugmentedLaunch:
        """Return the launch for num_rows rows, with no more rank blocks than the weights have."""
        launch = self.launch_of(num_rows)
        return replace(launch, max_blocks=min(launch.max_blocks, self.cache.num_blocks))

    def _tables(self, launch: AugmentedLaunch) -> LoraTables:
        """Return the tables with the launch's tile size; with tiles, a single row is a tile as
        well.
        """
        tables = self._work.tables
        if launch.tile_rows > 1:
            limits = replace(tables.limits, few_rows=0, tile_rows=launch.tile_rows)
            return replace(tables, limits=limits)
        return tables


def augmented_work(
    work: SegmentedWork, appended: Sequence[Sequence[Tensor]] | None, kernels: AugmentedLoraOps
) -> AugmentedWork | None:
    """Return None where the base weights have no appended rows.

    appended [layers][sites] of [blocks, slices, 16, in]
    """
    if appended is None:
        return None
    weights = make_augmented_weights(appended, work.pool, is_fp12=work.tables.is_fp12)
    return AugmentedWork(work, AugmentedCache(kernels, weights, work.directory, work.pool))


class AugmentedStep:
    """What the runner's layers call in one graph."""

    def __init__(self, work: SegmentedWork, tables: LoraTables, launch: AugmentedLaunch) -> None:
        self._work = work
        self._tables = tables
        self.launch = launch

    def resolve(self) -> None:
        self._work.resolve()

    def covers(self, site: int) -> bool:
        """Whether the step may change the site; if not, its GEMM skips the appended rows."""
        return self._work.covers(site)

    def at(self, layer: int, site: int) -> AugmentedSite:
        return AugmentedSite(self._tables, self._work.pool, self.launch, layer, site)

    def num_appended_rows(self, site: int) -> int:
        """Return the appended rows of a site's weight that the step's GEMM computes beside the
        outputs.
        """
        num_slices = len(self._tables.sites[site].shape.out_features)
        return self.launch.max_blocks * num_slices * RANK_BLOCK


def _tiles(
    slots: Sequence[tuple[tuple[int, float], ...]], lengths: Sequence[int], launch: AugmentedLaunch
) -> RowTiles:
    if all(len(pairs) == 0 or (len(pairs) == 1 and pairs[0][1] == 1.0) for pairs in slots):
        single = np.array([pairs[0][0] if pairs else BASE for pairs in slots], dtype=np.int32)
        return plain_tiles(np.repeat(single, lengths), launch.tile_rows, keeps_base=True)
    return gather_tiles(slots, lengths, launch.tile_rows, keeps_base=True)
