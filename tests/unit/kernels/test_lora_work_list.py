from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.kernels.gpu.lora.work_list import (
    BASE_TILES,
    BLOCK_INDEX,
    FIRST_USED,
    H_START,
    HEADER_WORDS,
    ITEM_WORDS,
    MAX_PROJECTIONS,
    NEXT_START,
    NUM_NEXT,
    NUM_ROWS,
    ROW_FIRST,
    ROW_ITEMS,
    ROW_START,
    SLOT,
    SMALL_FIRST,
    SMALL_ITEMS,
    TILE_FIRST,
    TILE_ITEMS,
    WEIGHT,
    Ints,
    RankBlockDirectory,
    RowTiles,
    WorkLimits,
    WorkListFull,
    build_work_list,
    gather_tiles,
    map_rows,
    plain_tiles,
)

LIMITS = WorkLimits(max_items=200, max_h_rows=2000)
Pairs = tuple[tuple[int, float], ...]


def directory_of(num_blocks: list[list[int]]) -> RankBlockDirectory:
    """num_blocks[slot]: rank blocks of each projection."""
    directory = RankBlockDirectory(max_slots=len(num_blocks), max_blocks=100)
    for blocks in num_blocks:
        directory.add(np.array(blocks, dtype=np.int32))
    return directory


def build(tiles: RowTiles, directory: RankBlockDirectory, limits: WorkLimits = LIMITS) -> Ints:
    out = np.full(limits.num_words, 7, dtype=np.int32)
    used = build_work_list(tiles, directory, limits, out)
    assert used == HEADER_WORDS + ITEM_WORDS * (out[ROW_ITEMS] + out[TILE_ITEMS] + out[BASE_TILES])
    return out


def items_of(out: Ints) -> Ints:
    return out[HEADER_WORDS:][: (out[ROW_ITEMS] + out[TILE_ITEMS]) * ITEM_WORDS].reshape(-1, 8)


def added_by(out: Ints) -> dict[int, list[tuple[int, int, float]]]:
    """row -> (slot, rank block, weight) of all that is added to it, by following the links."""
    items = items_of(out)
    found: dict[int, list[tuple[int, int, float]]] = {}
    first_items = [*range(out[ROW_FIRST]), *range(out[ROW_ITEMS], out[ROW_ITEMS] + out[TILE_FIRST])]
    for first in first_items:
        next_start = items[first, NEXT_START]
        for index in [first, *range(next_start, next_start + items[first, NUM_NEXT])]:
            item = items[index]
            weight = float(item[WEIGHT : WEIGHT + 1].view(np.float32)[0])
            assert item[ROW_START] == items[first, ROW_START]
            assert item[NUM_ROWS] == items[first, NUM_ROWS]
            for row in range(item[ROW_START], item[ROW_START] + item[NUM_ROWS]):
                found.setdefault(row, []).append((int(item[SLOT]), int(item[BLOCK_INDEX]), weight))
    return found


def check_classes(out: Ints, few_rows: int, small_rows: int) -> None:
    """Few rows, then tiles; the small ones first, both among first and among next items."""
    rows = items_of(out)[:, NUM_ROWS]
    few, first, items, small_first, small_items = (
        int(out[word]) for word in (ROW_ITEMS, TILE_FIRST, TILE_ITEMS, SMALL_FIRST, SMALL_ITEMS)
    )
    assert (rows[:few] <= few_rows).all()
    is_small = np.zeros(items, dtype=bool)
    is_small[:small_first] = True
    is_small[first : first + small_items - small_first] = True
    assert (rows[few:] > few_rows).all()
    assert np.array_equal(rows[few:] <= small_rows, is_small)


def base_rows(out: Ints) -> set[int]:
    first = HEADER_WORDS + (out[ROW_ITEMS] + out[TILE_ITEMS]) * ITEM_WORDS
    tiles = out[first:][: out[BASE_TILES] * ITEM_WORDS].reshape(-1, ITEM_WORDS)
    return {
        row for tile in tiles for row in range(tile[ROW_START], sum(tile[[ROW_START, NUM_ROWS]]))
    }


@given(
    runs=st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(0, 3), st.sampled_from([1.0, -0.5])), max_size=2, unique=True
            ).map(tuple),
            st.integers(1, 40),
        ),
        max_size=6,
    ),
    few_rows=st.sampled_from([0, 1, 4]),
    small_rows=st.sampled_from([0, 2, 8]),
    keeps_base=st.booleans(),
)
def test_every_row_gets_each_rank_block_of_its_adapters_once(
    runs: list[tuple[Pairs, int]], few_rows: int, small_rows: int, keeps_base: bool
) -> None:
    """Catches work that is skipped, done twice, or linked to other rows."""
    num_blocks = [[1, 1], [3, 1], [0, 2], [0, 0]]
    out = build(
        gather_tiles([pairs for pairs, _ in runs], [n for _, n in runs], 16, keeps_base=keeps_base),
        directory_of(num_blocks),
        replace(LIMITS, few_rows=few_rows, small_rows=small_rows),
    )
    check_classes(out, few_rows, small_rows)
    expected: dict[int, list[tuple[int, int, float]]] = {}
    nothing: set[int] = set()
    row = 0
    for pairs, count in runs:
        wanted = [(s, c, w) for s, w in pairs for c in range(max(num_blocks[s]))]
        expected |= {row + i: wanted for i in range(count) if wanted}
        if not wanted and (keeps_base or pairs):
            nothing |= set(range(row, row + count))
        row += count
    assert added_by(out) == expected
    assert base_rows(out) == nothing


@given(slots=st.lists(st.integers(-1, 3), max_size=70).map(sorted))
def test_plain_tiles_are_what_gathering_finds(slots: list[int]) -> None:
    plain = plain_tiles(np.array(slots, dtype=np.int32), 16)
    selections = [((s, 1.0),) if s >= 0 else () for s in slots]
    gathered = gather_tiles(selections, [1] * len(slots), 16)
    assert plain.weight is None
    for name in ("start", "num_rows", "slot"):
        assert getattr(plain, name).tolist() == getattr(gathered, name).tolist()
    directory = directory_of([[1, 1]] * 4)
    assert build(plain, directory).tolist() == build(gathered, directory).tolist()


@pytest.mark.parametrize(("num_rows", "expected"), [(1, [1]), (16, [16]), (20, [16, 4])])
def test_long_runs_are_cut_into_tiles(num_rows: int, expected: list[int]) -> None:
    plain = plain_tiles(np.zeros(num_rows, dtype=np.int32), 16)
    assert plain.num_rows.tolist() == expected


def test_h_rows_do_not_overlap() -> None:
    out = build(plain_tiles(np.array([0, 0, 1, 2], dtype=np.int32), 16), directory_of([[1]] * 3))
    items = items_of(out)
    places = [u[H_START] + i for u in items for i in range(u[NUM_ROWS])]
    assert sorted(places) == list(range(len(places)))


def test_a_block_of_augmented_weights_takes_the_place_of_partial_sums() -> None:
    out = np.zeros(LIMITS.num_words, dtype=np.int32)
    tiles = plain_tiles(np.array([0, 1], dtype=np.int32), 16)
    blocks = np.array([[5, 0], [8, 3]], dtype=np.int32)
    build_work_list(tiles, directory_of([[1], [2]]), LIMITS, out, blocks)
    items = items_of(out)
    assert sorted(items[:, H_START].tolist()) == [3, 5, 8]


def test_first_items_with_the_most_next_ones_come_first() -> None:
    """Catches a CTA that gets all long items: a step takes as long as its slowest CTA."""
    directory = directory_of([[1], [4], [2]])
    selections = [((slot, 1.0),) for slot in (0, 1, 2, 0, 1, 2)]
    out = build(gather_tiles(selections, [1, 1, 1, 3, 3, 3], 16), directory)
    first = items_of(out)
    rows = first[: out[ROW_FIRST]]
    tiles = first[out[ROW_ITEMS] :][: out[TILE_FIRST]]
    for some in (rows, tiles):
        assert some[:, NUM_NEXT].tolist() == [3, 1, 0]
        assert some[:, SLOT].tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    "limits",
    [WorkLimits(max_items=3, max_h_rows=2000), WorkLimits(max_items=200, max_h_rows=3)],
    ids=["items", "rows"],
)
def test_more_work_than_the_tables_hold_is_an_error(limits: WorkLimits) -> None:
    tiles = plain_tiles(np.arange(4, dtype=np.int32), 16)
    with pytest.raises(WorkListFull, match="make the tables larger"):
        build(tiles, directory_of([[1]] * 4), limits)


def test_a_step_without_adapters_has_no_work() -> None:
    out = build(plain_tiles(np.full(3, -1, dtype=np.int32), 16), directory_of([[1]]))
    assert out[:HEADER_WORDS].tolist() == [0] * HEADER_WORDS
    assert len(plain_tiles(np.zeros(0, dtype=np.int32), 16).start) == 0


class TestRankBlockDirectory:
    def test_gives_ranges_that_do_not_overlap_and_takes_them_back(self) -> None:
        directory = RankBlockDirectory(max_slots=3, max_blocks=10)
        assert directory.add(np.array([2, 1], dtype=np.int32)) == (0, 0)
        assert directory.add(np.array([0, 4], dtype=np.int32)) == (1, 3)
        assert directory.slots[1, :2].tolist() == [[3, 0], [3, 4]]
        directory.remove(0)
        assert directory.slots[0].tolist() == [[0, 0]] * 8
        assert directory.add(np.array([1, 1], dtype=np.int32)) == (0, 0)
        assert directory.add(np.array([3, 0], dtype=np.int32)) == (2, 7)

    @pytest.mark.parametrize("blocks", [[11], [1]], ids=["no room", "no slot"])
    def test_a_full_table_is_an_error(self, blocks: list[int]) -> None:
        directory = RankBlockDirectory(max_slots=1, max_blocks=10)
        if blocks == [1]:
            directory.add(np.array([1], dtype=np.int32))
        with pytest.raises(WorkListFull, match="evict an adapter"):
            directory.add(np.array(blocks, dtype=np.int32))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_two_adapters_ever_share_a_row_and_none_is_lost(moves: list[tuple[bool, int]]) -> None:
    directory = RankBlockDirectory(max_slots=4, max_blocks=12)
    held: dict[int, set[int]] = {}
    for is_new, number in moves:
        if is_new or not held:
            try:
                slot, start = directory.add(np.array([number], dtype=np.int32))
            except WorkListFull:
                free = set(range(12)).difference(*held.values())
                runs = [all(r + i in free for i in range(number)) for r in range(12)]
                assert len(held) == 4 or not any(runs), "there was room"
                continue
            assert slot not in held
            held[slot] = set(range(start, start + number))
        else:
            slot = sorted(held)[number % len(held)]
            directory.remove(slot)
            del held[slot]
        rows = [row for rows_of_slot in held.values() for row in rows_of_slot]
        assert len(rows) == len(set(rows)) and all(0 <= row < 12 for row in rows)


def test_the_list_says_which_projections_its_adapters_change() -> None:
    directory = directory_of([[1, 0, 2, 0], [0, 0, 1, 0], [0, 0, 0, 3]])
    used = slice(FIRST_USED, FIRST_USED + MAX_PROJECTIONS)
    selections = [((0, 1.0),), (), ((1, 1.0),)]
    out = build(gather_tiles(selections, [1, 1, 1], 16), directory)
    assert out[used].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    out = build(gather_tiles([()], [4], 16), directory)
    assert out[used].tolist() == [0] * 8


@given(
    slots=st.lists(st.integers(-1, 2), min_size=1, max_size=40).map(sorted),
    tile_rows=st.sampled_from([1, 16]),
)
def test_a_list_that_contains_all_rows_has_one_first_item_for_each(
    slots: list[int], tile_rows: int
) -> None:
    """Catches rows that a kernel would not compute, and base rows that find weights."""
    limits = WorkLimits(
        max_items=200, max_h_rows=0, few_rows=int(tile_rows == 1), max_rows=len(slots)
    )
    out = np.zeros(limits.num_words, dtype=np.int32)
    tiles = plain_tiles(np.array(slots, dtype=np.int32), tile_rows, keeps_base=True)
    pairs = [((s, 1.0),) if s >= 0 else () for s in slots]
    gathered = gather_tiles(pairs, [1] * len(slots), tile_rows, keeps_base=True)
    assert tiles.slot.tolist() == gathered.slot.tolist()
    num_blocks = [1, 2, 0]
    blocks = np.array([[4, 0], [2, 3], [0, 0]], dtype=np.int32)
    build_work_list(tiles, directory_of([[count] for count in num_blocks]), limits, out, blocks)
    map_rows(limits, out)
    items = items_of(out)
    for row, slot in enumerate(slots):
        first = items[out[limits.row_map_start + row]]
        assert first[ROW_START] <= row < first[ROW_START] + first[NUM_ROWS] <= row + tile_rows
        assert first[NUM_NEXT] == (1 if slot == 1 else 0)
        if slot >= 0:
            assert (first[SLOT], first[BLOCK_INDEX], first[H_START]) == (slot, 0, blocks[slot, 0])
        else:
            assert first[BLOCK_INDEX] >= max(num_blocks)
