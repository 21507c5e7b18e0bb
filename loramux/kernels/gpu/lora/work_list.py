"""A step's LoRA work as one list of integers, built on the host once and read by every layer.

A work item is one rank block of one adapter for one tile of adjacent rows, at every projection.
Several rank blocks may be added to the same rows (higher ranks, several adapters): the first item
of the rows links to the next ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import ne

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

RANK_BLOCK = 16
ALIGN_ELEMENTS = 64
"""Addresses in the pool count units of so many elements."""
MAX_SLICES = 3
MAX_PROJECTIONS = 8

# The header: numbers of first items of few rows, of all items of few rows, of first items that are
# tiles, of all tiles; then 1 for each projection that any adapter of the list changes. The items
# follow in this order. SMALL_*: small tiles among those, which precede the other tiles both among
# first and among next items. BASE_TILES: tiles of rows without an adapter, behind all items.
HEADER_WORDS = 16
ROW_FIRST, ROW_ITEMS, TILE_FIRST, TILE_ITEMS, FIRST_USED = range(5)
SMALL_FIRST, SMALL_ITEMS, BASE_TILES = 12, 13, 14
ITEM_WORDS = 8
SLOT, BLOCK_INDEX, NUM_ROWS, ROW_START, H_START, WEIGHT, NEXT_START, NUM_NEXT = range(ITEM_WORDS)
# `resolve` turns an item into one for each projection of each layer: the addresses of its weights
# replace slot and rank block, and NUM_ROWS becomes ranks + rows * 2^16.
A_ADDRESS, B_ADDRESS = SLOT, BLOCK_INDEX
# The device's directory: a rank block's entry is (address of A, address of B, ranks, 0), and a slot
# has (first rank block, number of rank blocks) for each projection.
ENTRY_WORDS = 4
RANGE_WORDS = 2
# Slot of rows without an adapter, in lists that contain every row. Their items have a block index
# that no adapter has, so that they resolve to no ranks.
BASE = -1
NO_BLOCK = 0x7FFF
# The bits of 1.0.
ONE = np.array(1, dtype=np.float32).view(np.int32)

# Sort keys of items of few rows, of small tiles and of tiles.
_FIRST_KEYS = np.array([0, 2, 3])
_NEXT_KEYS = np.array([1, 4, 5])


class WorkListFull(ValueError):
    """The step has more LoRA work than the device tables hold."""


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
    """Sum of the rows of all items."""
    tile_rows: int = 16
    """Rows of a tile, at most; longer runs of rows are split."""
    few_rows: int = 2
    """Items of up to so many rows are computed row by row; larger ones are tiles for tensor cores.
    0: a single row is a tile as well (prefill)."""
    small_rows: int = 0
    """Tiles of up to so many rows are small: an fp12 shrink treats them like few rows."""
    max_rows: int = 0
    """Rows of the map from each row to its first item, behind the items."""

    @property
    def row_map_start(self) -> int:
        return HEADER_WORDS + self.max_items * ITEM_WORDS

    @property
    def num_words(self) -> int:
        """Length of the longest work list."""
        return self.row_map_start + self.max_rows


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Entry e adds adapter slot[e], times weight[e], to num_rows[e] rows from start[e].

    Entries are in the order of rows. Entries with the same start are several adapters of the same
    rows; rows without an adapter have no entry, or one of slot BASE.
    """

    start: Ints
    num_rows: Ints
    slot: Ints
    weight: NDArray[np.float32] | None
    """None: all weights are 1, and no row has two entries."""


def gather_tiles(
    selections: Sequence[Sequence[tuple[int, float]]],
    num_rows: Sequence[int],
    tile_rows: int,
    *,
    keeps_base: bool = False,
) -> RowTiles:
    """Cuts rows into tiles; selections[i]: (slot, weight) pairs of the next num_rows[i] rows.

    Adjacent rows of equal selections become one run, which is split into tiles of tile_rows.
    """
    if not selections:
        none = np.zeros(0, np.int32)
        return RowTiles(none, none, none, np.zeros(0, np.float32))
    nothing = ((BASE, 0.0),) if keeps_base else ()
    is_new = np.fromiter(map(ne, selections[1:], selections), np.bool_, len(selections) - 1)
    first = np.concatenate((np.zeros(1, np.intp), np.flatnonzero(is_new) + 1))
    row = np.concatenate((np.zeros(1, np.intp), np.cumsum(num_rows)))
    start, stop = row[first], row[np.append(first[1:], len(selections))]
    runs = [selections[number] or nothing for number in first.tolist()]
    pairs = list(chain.from_iterable(runs))
    num_pairs = np.fromiter(map(len, runs), np.intp, len(runs))
    num_entries = num_pairs * -(-(stop - start) // tile_rows)
    # Of each entry: its run, its number in the run, the tile of the run, the pair of the selection.
    run = np.repeat(np.arange(len(runs)), num_entries)
    number = np.arange(len(run)) - (np.cumsum(num_entries) - num_entries)[run]
    tile = number // num_pairs[run]
    pair = (np.cumsum(num_pairs) - num_pairs)[run] + number - tile * num_pairs[run]
    start = start[run] + tile * tile_rows
    slots, weights = zip(*pairs, strict=True) if pairs else ((), ())
    return RowTiles(
        start=start.astype(np.int32),
        num_rows=np.minimum(stop[run] - start, tile_rows).astype(np.int32),
        slot=np.array(slots, np.int32)[pair],
        weight=np.array(weights, np.float32)[pair],
    )


def plain_tiles(slots: Ints, tile_rows: int, *, keeps_base: bool = False) -> RowTiles:
    """gather_tiles for one adapter per row at weight 1 (slots[i], or BASE), vectorized."""
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
        """First rank block and number of rank blocks of each projection."""
        self.num_blocks: Ints = np.zeros(max_slots, dtype=np.int32)
        """Rank blocks of the slot's adapter: the maximum over its projections."""
        self._max_blocks = max_blocks
        self._ranges: dict[int, tuple[int, int]] = {}
        self._free_slots = list(range(max_slots - 1, -1, -1))
        # Free rows of the table, in order; adjacent rows are one gap.
        self._gaps: list[tuple[int, int]] = [(0, max_blocks)] if max_blocks else []

    def add(self, blocks_per_projection: Ints) -> tuple[int, int]:
        """Allocates one row of the table per rank block; returns (slot, first row)."""
        num_blocks = int(blocks_per_projection.sum())
        gap = next((i for i, (a, b) in enumerate(self._gaps) if b - a >= num_blocks), None)
        if not self._free_slots or (gap is None and num_blocks > 0):
            raise WorkListFull(
                f"No room for {num_blocks} rank blocks of an adapter among {len(self._ranges)}: "
                f"the table has {len(self.slots)} slots and {self._max_blocks} rank blocks. "
                "Make it larger, or evict an adapter first."
            )
        slot = self._free_slots.pop()
        start = 0 if gap is None else self._take(gap, num_blocks)
        self._ranges[slot] = (start, start + num_blocks)
        ranges = self.slots[slot, : len(blocks_per_projection)]
        ranges[:, 0] = start + np.cumsum(blocks_per_projection) - blocks_per_projection
        ranges[:, 1] = blocks_per_projection
        self.num_blocks[slot] = blocks_per_projection.max()
        return slot, start

    def remove(self, slot: int) -> None:
        self._give_back(*self._ranges.pop(slot))
        self._free_slots.append(slot)
        self.slots[slot] = 0
        self.num_blocks[slot] = 0

    def _take(self, gap: int, num_blocks: int) -> int:
        start, stop = self._gaps[gap]
        self._gaps[gap : gap + 1] = [(start + num_blocks, stop)] * (stop - start > num_blocks)
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
    """Fill out, which has limits.num_words; return how many words are used.

    Rows that no adapter changes (slot BASE, or adapters without rank blocks) become base tiles.
    augmented_blocks[slot, i]: for kernels that read h from the base GEMM, the block of augmented
    weights that holds the slot's rank block i. Such a list has an item for each entry of `tiles`.
    """
    num_blocks = directory.num_blocks.take(tiles.slot)
    base = None
    if augmented_blocks is not None:
        num_blocks = np.where(tiles.slot == BASE, 1, np.maximum(num_blocks, 1))
    elif (num_blocks == 0).any() or (tiles.slot == BASE).any():
        num_blocks = np.where(tiles.slot == BASE, 0, num_blocks)
        base = _base_tiles(tiles, num_blocks)
        tiles, num_blocks = _entries(tiles, num_blocks > 0), num_blocks[num_blocks > 0]
    num_base = 0 if base is None else len(base)
    items, has_next = _items(tiles, num_blocks)
    h_rows = 0 if augmented_blocks is not None else int(np.add.reduce(items[:, NUM_ROWS]))
    _check(len(items) + num_base, h_rows, limits)
    slot = items[:, SLOT].copy()
    if augmented_blocks is not None:
        _set_augmented_blocks(items, augmented_blocks)
    # CTAs share the items, so the longest come first; `map_rows` needs the order of rows.
    is_segmented = augmented_blocks is None
    items = _sort(items, has_next, limits, out[:HEADER_WORDS], longest_first=is_segmented)
    used = directory.slots[slot[slot != BASE], :, 1].any(axis=0)
    out[FIRST_USED : FIRST_USED + MAX_PROJECTIONS] = used
    if is_segmented:
        num_rows = items[:, NUM_ROWS]
        items[:, H_START] = np.cumsum(num_rows) - num_rows
    if base is not None:
        items = np.concatenate((items, base))
        out[BASE_TILES] = num_base
    end = HEADER_WORDS + items.size
    out[HEADER_WORDS:end] = items.reshape(-1)
    return end


def _items(tiles: RowTiles, num_blocks: Ints) -> tuple[Ints, bool]:
    """One item per rank block of each entry, and whether rows may have several of them."""
    start, num_rows, slot = tiles.start, tiles.num_rows, tiles.slot
    weight = ONE if tiles.weight is None else tiles.weight.view(np.int32)
    block_index: Ints | None = None
    if tiles.weight is not None or len(slot) != np.count_nonzero(num_blocks == 1):
        entry = np.repeat(np.arange(len(slot)), num_blocks)
        first = np.cumsum(num_blocks) - num_blocks
        block_index = (np.arange(len(entry)) - first[entry]).astype(np.int32)
        start, num_rows, slot = start[entry], num_rows[entry], slot[entry]
        weight = weight if tiles.weight is None else weight[entry]
    items = np.zeros((len(slot), ITEM_WORDS), dtype=np.int32)
    items[:, SLOT] = slot
    items[:, NUM_ROWS] = num_rows
    items[:, ROW_START] = start
    items[:, WEIGHT] = weight
    if block_index is not None:
        items[:, BLOCK_INDEX] = block_index
    return items, block_index is not None


def _entries(tiles: RowTiles, wanted: NDArray[np.bool_]) -> RowTiles:
    weight = None if tiles.weight is None else tiles.weight[wanted]
    return RowTiles(tiles.start[wanted], tiles.num_rows[wanted], tiles.slot[wanted], weight)


def _base_tiles(tiles: RowTiles, num_blocks: Ints) -> Ints:
    """Items of rows without an adapter: NUM_ROWS and ROW_START, the other words are 0."""
    found = np.flatnonzero(num_blocks == 0)
    if tiles.weight is not None:
        # Other adapters may change the same rows.
        found = found[~np.isin(tiles.start[found], tiles.start[num_blocks > 0])]
    items = np.zeros((len(found), ITEM_WORDS), dtype=np.int32)
    items[:, NUM_ROWS] = tiles.num_rows[found]
    items[:, ROW_START] = tiles.start[found]
    return items


def map_rows(limits: WorkLimits, out: Ints) -> None:
    """Append the index of each row's first item to a list that contains every row."""
    num_first = int(out[ROW_FIRST] + out[TILE_FIRST])
    first = out[HEADER_WORDS:].reshape(-1)[: num_first * ITEM_WORDS].reshape(-1, ITEM_WORDS)
    rows = np.repeat(np.arange(num_first, dtype=np.int32), first[:, NUM_ROWS])
    out[limits.row_map_start : limits.row_map_start + len(rows)] = rows


def _set_augmented_blocks(items: Ints, augmented_blocks: Ints) -> None:
    is_base = items[:, SLOT] == BASE
    items[is_base, SLOT] = 0
    items[:, H_START] = augmented_blocks[items[:, SLOT], items[:, BLOCK_INDEX]]
    items[is_base, BLOCK_INDEX] = NO_BLOCK
    items[is_base, H_START] = 0


def _sort(
    items: Ints, has_next: bool, limits: WorkLimits, header: Ints, *, longest_first: bool
) -> Ints:
    """Sorts the items in the order of the list, links first items to next ones, sets the header."""
    num_items = len(items)
    # 0: few rows, 1: a small tile, 2: a tile
    small_rows = max(limits.small_rows if longest_first else 0, limits.few_rows)
    num_rows = items[:, NUM_ROWS]
    kind = (num_rows > limits.few_rows).astype(np.int8) + (num_rows > small_rows)
    num_few, num_small, _ = np.bincount(kind, minlength=3).tolist()
    num_tiles = num_items - num_few
    header[:] = 0
    header[:4] = num_few, num_few, num_tiles, num_tiles
    header[SMALL_FIRST] = header[SMALL_ITEMS] = num_small
    if not has_next:
        is_sorted = max(num_few, num_small, num_tiles - num_small) == num_items
        return items if is_sorted else items[np.argsort(kind, kind="stable")]
    is_first = np.diff(items[:, ROW_START], prepend=-1) != 0
    first = np.flatnonzero(is_first)
    header[ROW_FIRST], header[SMALL_FIRST], _ = np.bincount(kind[first], minlength=3)
    header[TILE_FIRST] = len(first) - header[ROW_FIRST]
    num_next = np.diff(first, append=num_items) - 1
    items[first, NUM_NEXT] = num_next
    # First items of few rows, their next items, first items of small tiles, of other tiles, and the
    # next items of either.
    key = np.where(is_first, _FIRST_KEYS[kind], _NEXT_KEYS[kind]) * num_items
    order = np.argsort(key - items[:, NUM_NEXT] if longest_first else key, kind="stable")
    position = np.empty(num_items + 1, dtype=np.int32)
    position[order] = np.arange(num_items, dtype=np.int32)
    # The next items of the same rows stay adjacent.
    items[first, NEXT_START] = np.where(num_next > 0, position[first + 1], 0)
    return items[order]


def _check(num_items: int, num_h_rows: int, limits: WorkLimits) -> None:
    if num_items > limits.max_items or num_h_rows > limits.max_h_rows:
        raise WorkListFull(
            f"The step has {num_items} LoRA work items with {num_h_rows} rows together; the "
            f"tables hold {limits.max_items} and {limits.max_h_rows}. Run fewer rows or lower "
            "ranks in one step, or make the tables larger."
        )
