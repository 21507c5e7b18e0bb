"""A step's LoRA work as one list of integers, built on the host once and read by every layer.

A unit is one group of ranks of one adapter for one tile of neighbouring rows, at every projection.
What else is added to the same rows (more groups, more adapters) follows a unit: it is its head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

RANK_BLOCK = 16
ALIGN_ELEMENTS = 64
MAX_SLICES = 3
MAX_PROJECTIONS = 8

# The list begins with how many units are heads of few rows, of few rows, heads of tiles, of tiles,
# and with 1 for each projection that any of them changes; the units follow in this order. Then how
# many of the tiles are small, heads and all: they come first, among heads and among what follows.
# Last the number of base tiles: rows without an adapter, behind all units.
HEADER_WORDS = 16
ROW_HEADS, ROW_UNITS, TILE_HEADS, TILE_UNITS, FIRST_USED = range(5)
SMALL_HEADS, SMALL_UNITS, BASE_TILES = 12, 13, 14
UNIT_WORDS = 8
SLOT, CHAIN, NUM_ROWS, ROW_START, H_START, WEIGHT, MORE_START, NUM_MORE = range(UNIT_WORDS)
# A record is a unit at one projection of one layer: where its weights are, and in NUM_ROWS the
# number of ranks too (ranks + rows * 2^16).
A_ADDRESS, B_ADDRESS = SLOT, CHAIN
# In place of a slot: rows without an adapter, in lists that name every row. Their units have a
# place in the chain that no adapter has, so that nothing is found there.
BASE = -1
NO_GROUP = 0x7FFF
# The bits of 1.0.
ONE = np.array(1, dtype=np.float32).view(np.int32)


# Of few rows, small tiles and tiles, in the order of the list.
_HEADS_PLACE = np.array([0, 2, 3])
_FOLLOWERS_PLACE = np.array([1, 4, 5])


class WorkListFull(ValueError):
    """A step has more LoRA work than the device tables were made for."""


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One fused linear layer; slice i writes out_features[i] columns of its output."""

    name: str
    in_features: int
    out_features: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    max_items: int
    max_h_rows: int
    """Sum over all units of their rows."""
    tile_rows: int = 16
    """Longer runs of rows are cut."""
    alone_rows: int = 2
    """Units of up to so many rows are rows one by one, on vector units: the faster ones for them.
    0: a single row is a tile too, as in prompts."""
    small_rows: int = 0
    """Tiles of up to so many rows are small: a shrink sums them as it does rows alone."""
    max_rows: int = 0
    """Of a list that says, behind its units, which of them is the head of each row."""

    @property
    def row_map_start(self) -> int:
        return HEADER_WORDS + self.max_items * UNIT_WORDS

    @property
    def num_words(self) -> int:
        """Of the longest list."""
        return self.row_map_start + self.max_rows


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Entry e adds adapter slot[e], times weight[e], to num_rows[e] rows from start[e].

    In the order of rows. Entries with one start are several adapters on the same rows; base rows
    have none, or one of slot BASE.
    """

    start: Ints
    num_rows: Ints
    slot: Ints
    weight: NDArray[np.float32] | None
    """None: all are 1, and no row has two entries."""


def gather_tiles(
    selections: Sequence[Sequence[tuple[int, float]]],
    num_rows: Sequence[int],
    tile_rows: int,
    *,
    keeps_base: bool = False,
) -> RowTiles:
    """selections[i]: (slot, weight) pairs of the next num_rows[i] rows; neighbours are joined.

    Runs are cut into tiles of tile_rows.
    """
    nothing = ((BASE, 0.0),) if keeps_base else ()
    runs: list[tuple[int, int, Sequence[tuple[int, float]]]] = []
    row = 0
    for selection, count in zip(selections, num_rows, strict=True):
        if runs and runs[-1][2] == selection:
            runs[-1] = (runs[-1][0], row + count, selection)
        else:
            runs.append((row, row + count, selection))
        row += count
    entries = [
        (start, min(tile_rows, stop - start), slot, weight)
        for first, stop, selection in runs
        for start in range(first, stop, tile_rows)
        for slot, weight in selection or nothing
    ]
    columns = zip(*entries, strict=True) if entries else ((), (), (), ())
    start, rows, slot, weight = columns
    return RowTiles(
        start=np.array(start, dtype=np.int32),
        num_rows=np.array(rows, dtype=np.int32),
        slot=np.array(slot, dtype=np.int32),
        weight=np.array(weight, dtype=np.float32),
    )


def plain_tiles(slots: Ints, tile_rows: int, *, keeps_base: bool = False) -> RowTiles:
    """As gather_tiles; slots[i]: the one adapter of row i, at weight 1, or BASE. Fast."""
    start = np.flatnonzero(slots[1:] != slots[:-1]).astype(np.int32)
    start += 1
    if len(slots):
        start = np.concatenate((np.zeros(1, np.int32), start))
    stop = np.append(start[1:], np.int32(len(slots)))[: len(start)]
    slot = slots[start]
    if not keeps_base and len(slots) and slots.min() < 0:
        used = slot >= 0
        start, stop, slot = start[used], stop[used], slot[used]
    num_rows = stop - start
    if len(start) and num_rows.max() > tile_rows:
        per_run = (num_rows + (tile_rows - 1)) // tile_rows
        run = np.repeat(np.arange(len(start)), per_run)
        first = np.cumsum(per_run) - per_run
        within = (np.arange(len(run)) - first[run]).astype(np.int32)
        start = start[run] + within * tile_rows
        num_rows = np.minimum(stop[run] - start, tile_rows)
        slot = slot[run]
    return RowTiles(start, num_rows, slot, None)


class RankBlockDirectory:
    """Allocates rows of the device's table of rank blocks to adapter slots.

    That table is [layers, max_blocks, 4], rows as in RankBlockTable.addresses; `slots` is copied
    to the device beside it when an adapter is added.
    """

    def __init__(self, *, max_slots: int, max_blocks: int) -> None:
        self.slots: Ints = np.zeros((max_slots, MAX_PROJECTIONS, 2), dtype=np.int32)
        """First group and number of groups of each projection."""
        self.num_blocks: Ints = np.zeros(max_slots, dtype=np.int32)
        """The most groups that any projection of the slot's adapter has."""
        self._max_groups = max_blocks
        self._ranges: dict[int, tuple[int, int]] = {}
        self._free_slots = list(range(max_slots - 1, -1, -1))
        # Rows of the table that nobody has, in order; neighbours are one gap.
        self._gaps: list[tuple[int, int]] = [(0, max_blocks)] if max_blocks else []

    def add(self, blocks_per_projection: Ints) -> tuple[int, int]:
        """(slot, first row of the table) for as many rows as there are groups."""
        num_groups = int(blocks_per_projection.sum())
        gap = next((i for i, (a, b) in enumerate(self._gaps) if b - a >= num_groups), None)
        if not self._free_slots or (gap is None and num_groups > 0):
            raise WorkListFull(
                f"No room for an adapter of {num_groups} groups among {len(self._ranges)} others: "
                f"the table has {len(self.slots)} slots and {self._max_groups} groups. "
                "Make it larger, or evict an adapter first."
            )
        slot = self._free_slots.pop()
        start = 0 if gap is None else self._take(gap, num_groups)
        self._ranges[slot] = (start, start + num_groups)
        mine = self.slots[slot, : len(blocks_per_projection)]
        mine[:, 0] = start + np.cumsum(blocks_per_projection) - blocks_per_projection
        mine[:, 1] = blocks_per_projection
        self.num_blocks[slot] = blocks_per_projection.max()
        return slot, start

    def remove(self, slot: int) -> None:
        self._give_back(*self._ranges.pop(slot))
        self._free_slots.append(slot)
        self.slots[slot] = 0
        self.num_blocks[slot] = 0

    def _take(self, gap: int, num_groups: int) -> int:
        start, stop = self._gaps[gap]
        self._gaps[gap : gap + 1] = [(start + num_groups, stop)] * (stop - start > num_groups)
        return start

    def _give_back(self, start: int, stop: int) -> None:
        if start == stop:
            return
        at = bisect_left(self._gaps, (start, stop))
        if at < len(self._gaps) and self._gaps[at][0] == stop:
            stop = self._gaps.pop(at)[1]
        if at > 0 and self._gaps[at - 1][1] == start:
            at -= 1
            start = self._gaps.pop(at)[0]
        self._gaps.insert(at, (start, stop))


def build_work_list(
    tiles: RowTiles,
    directory: RankBlockDirectory,
    limits: WorkLimits,
    out: Ints,
    augmented_blocks: Ints | None = None,
) -> int:
    """Fills out, which has limits.num_words; returns how many words are used.

    Rows that no adapter changes, of slot BASE or of adapters without any group, are base tiles.
    augmented_blocks[slot, i]: for kernels that read h from the base product, where the slot's i-th
    group of ranks is in every tail. Such a list has a unit for each entry of `tiles`.
    """
    chained = directory.num_blocks.take(tiles.slot)
    base = None
    if augmented_blocks is not None:
        chained = np.where(tiles.slot == BASE, 1, np.maximum(chained, 1))
    elif (chained == 0).any() or (tiles.slot == BASE).any():
        chained = np.where(tiles.slot == BASE, 0, chained)
        base = _base_tiles(tiles, chained)
        tiles, chained = _those(tiles, chained > 0), chained[chained > 0]
    start, num_rows, slot = tiles.start, tiles.num_rows, tiles.slot
    weight = ONE if tiles.weight is None else tiles.weight.view(np.int32)
    chain: Ints | None = None
    if tiles.weight is not None or len(slot) != np.count_nonzero(chained == 1):
        entry = np.repeat(np.arange(len(slot)), chained)
        first = np.cumsum(chained) - chained
        chain = (np.arange(len(entry)) - first[entry]).astype(np.int32)
        start, num_rows, slot = start[entry], num_rows[entry], slot[entry]
        weight = weight if tiles.weight is None else weight[entry]
    h_rows = 0 if augmented_blocks is not None else int(np.add.reduce(num_rows))
    num_base = 0 if base is None else len(base)
    _check(len(slot) + num_base, h_rows, limits)
    units = np.zeros((len(slot), UNIT_WORDS), dtype=np.int32)
    units[:, SLOT] = slot
    units[:, NUM_ROWS] = num_rows
    units[:, ROW_START] = start
    units[:, WEIGHT] = weight
    if chain is not None:
        units[:, CHAIN] = chain
    if augmented_blocks is not None:
        _name_blocks(units, augmented_blocks)
    # Programs deal the units out among them, so the longest come first; `map_rows` needs rows.
    dealt = augmented_blocks is None
    units = _sort(units, chain is not None, limits, out[:HEADER_WORDS], longest_first=dealt)
    used = directory.slots[slot[slot != BASE], :, 1].any(axis=0)
    out[FIRST_USED : FIRST_USED + MAX_PROJECTIONS] = used
    if augmented_blocks is None:
        num_rows = units[:, NUM_ROWS]
        units[:, H_START] = np.cumsum(num_rows) - num_rows
    if base is not None:
        units = np.concatenate((units, base))
        out[BASE_TILES] = num_base
    end = HEADER_WORDS + units.size
    out[HEADER_WORDS:end] = units.reshape(-1)
    return end


def _those(tiles: RowTiles, wanted: NDArray[np.bool_]) -> RowTiles:
    weight = None if tiles.weight is None else tiles.weight[wanted]
    return RowTiles(tiles.start[wanted], tiles.num_rows[wanted], tiles.slot[wanted], weight)


def _base_tiles(tiles: RowTiles, chained: Ints) -> Ints:
    """Units of rows that nothing is added to: how many, and the first of them, no more."""
    found = np.flatnonzero(chained == 0)
    if tiles.weight is not None:
        # Other adapters of the same rows may add something.
        found = found[~np.isin(tiles.start[found], tiles.start[chained > 0])]
    units = np.zeros((len(found), UNIT_WORDS), dtype=np.int32)
    units[:, NUM_ROWS] = tiles.num_rows[found]
    units[:, ROW_START] = tiles.start[found]
    return units


def map_rows(limits: WorkLimits, out: Ints) -> None:
    """Behind a list that names every row: which unit is the head of each."""
    num_heads = int(out[ROW_HEADS] + out[TILE_HEADS])
    heads = out[HEADER_WORDS:].reshape(-1)[: num_heads * UNIT_WORDS].reshape(-1, UNIT_WORDS)
    units = np.repeat(np.arange(num_heads, dtype=np.int32), heads[:, NUM_ROWS])
    out[limits.row_map_start : limits.row_map_start + len(units)] = units


def _name_blocks(units: Ints, augmented_blocks: Ints) -> None:
    is_base = units[:, SLOT] == BASE
    units[is_base, SLOT] = 0
    units[:, H_START] = augmented_blocks[units[:, SLOT], units[:, CHAIN]]
    units[is_base, CHAIN] = NO_GROUP
    units[is_base, H_START] = 0


def _sort(
    units: Ints, is_chained: bool, limits: WorkLimits, header: Ints, *, longest_first: bool
) -> Ints:
    """The units in the order of the list, each head linked to what follows it."""
    num_units = len(units)
    # 0: few rows, 1: a small tile, 2: a tile
    small_rows = max(limits.small_rows if longest_first else 0, limits.alone_rows)
    num_rows = units[:, NUM_ROWS]
    kind = (num_rows > limits.alone_rows).astype(np.int8) + (num_rows > small_rows)
    num_few, num_small, _ = np.bincount(kind, minlength=3).tolist()
    num_tiles = num_units - num_few
    header[:] = 0
    header[:4] = num_few, num_few, num_tiles, num_tiles
    header[SMALL_HEADS] = header[SMALL_UNITS] = num_small
    if not is_chained:
        is_sorted = max(num_few, num_small, num_tiles - num_small) == num_units
        return units if is_sorted else units[np.argsort(kind, kind="stable")]
    is_head = np.diff(units[:, ROW_START], prepend=-1) != 0
    heads = np.flatnonzero(is_head)
    header[ROW_HEADS], header[SMALL_HEADS], _ = np.bincount(kind[heads], minlength=3)
    header[TILE_HEADS] = len(heads) - header[ROW_HEADS]
    num_more = np.diff(heads, append=num_units) - 1
    units[heads, NUM_MORE] = num_more
    # Heads of few rows, what follows them, heads of small tiles, of others, what follows either.
    key = np.where(is_head, _HEADS_PLACE[kind], _FOLLOWERS_PLACE[kind]) * num_units
    order = np.argsort(key - units[:, NUM_MORE] if longest_first else key, kind="stable")
    place = np.empty(num_units + 1, dtype=np.int32)
    place[order] = np.arange(num_units, dtype=np.int32)
    # What follows a head keeps its order, behind all heads.
    units[heads, MORE_START] = np.where(num_more > 0, place[heads + 1], 0)
    return units[order]


def _check(num_units: int, num_h_rows: int, limits: WorkLimits) -> None:
    if num_units > limits.max_items or num_h_rows > limits.max_h_rows:
        raise WorkListFull(
            f"The step has {num_units} units of LoRA work with {num_h_rows} rows together; the "
            f"tables hold {limits.max_items} and {limits.max_h_rows}. Run fewer rows or lower "
            "ranks in one step, or make the tables larger."
        )
