"""Split-KV: every visible token is in exactly one work item, on the host and the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.kernels.gpu.attention import split_kv
from loramux.kernels.gpu.attention.split_kv import Partition
from loramux.kernels.ops import SequenceRows, StepRows
from loramux.kernels.reference import split_kv as reference
from loramux.types.kv import KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_tokens=4)


def covered_tokens(items: torch.Tensor, sequence: int, row: int) -> list[int]:
    own = [item for item in items.tolist() if item[2] and item[0] == sequence]
    own = [item for item in own if item[1] <= row < item[1] + item[2]]
    return sorted(token for item in own for token in range(item[4], item[5]))


def partition_all(
    sequences: list[SequenceRows], members: list[bool], partition: Partition
) -> torch.Tensor:
    return split_kv.partition_sequences(StepRows.of(sequences), np.array(members), partition)


def partition_by_block(
    sequences: list[SequenceRows], members: list[bool], partition: Partition
) -> torch.Tensor:
    """Block by block, and then in torch."""
    blocks = [
        (place, sequence.row_start + first, num_rows, sequence.position_start + first)
        for place, sequence in enumerate(sequences)
        if members[place]
        for first in range(0, sequence.num_rows, partition.rows)
        if (num_rows := min(partition.rows, sequence.num_rows - first))
    ]
    blocks.sort(key=lambda block: -block[2] - block[3])
    return reference.partition_blocks(
        torch.tensor(blocks, dtype=torch.int32).view(-1, 4), partition
    )


@settings(max_examples=200)
@given(
    mix=st.lists(
        st.tuples(st.integers(0, 900), st.integers(1, 300), st.booleans()), min_size=1, max_size=30
    ),
    rows=st.sampled_from([1, 4, 32]),
    tile=st.sampled_from([4, 64]),
    splits=st.integers(1, 120),
    window=st.one_of(st.none(), st.integers(1, 400)),
    least=st.sampled_from([1, 100, 512]),
)
def test_items_are_those_of_cutting_block_by_block(  # noqa: PLR0913
    mix: list[tuple[int, int, bool]],
    rows: int,
    tile: int,
    splits: int,
    window: int | None,
    least: int,
) -> None:
    sequences, row = [], 0
    for start, count, _ in mix:
        sequences.append(SequenceRows(row, count, start, []))
        row += count
    members = [is_member for _, _, is_member in mix]
    partition = Partition(rows, tile, splits, window, least)
    items = partition_all(sequences, members, partition)
    assert items.dtype == torch.int32
    assert torch.equal(items, partition_by_block(sequences, members, partition))
    lengths, starts = [count for _, count, _ in mix], [start for start, _, _ in mix]
    same = StepRows.of_lengths(lengths, starts)
    assert torch.equal(split_kv.partition_sequences(same, np.array(members), partition), items)


@settings(max_examples=60)
@given(
    mix=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=5),
    rows=st.integers(1, 8),
    tile=st.sampled_from([4, 16]),
    splits=st.integers(1, 40),
    window=st.one_of(st.none(), st.integers(1, 30)),
)
def test_each_row_meets_all_it_may_see_once(
    mix: list[tuple[int, int]], rows: int, tile: int, splits: int, window: int | None
) -> None:
    sequences, row = [], 0
    for start, count in mix:
        sequences.append(SequenceRows(row, count, start, []))
        row += count
    partition = Partition(rows, tile, splits, window)
    items = partition_all(sequences, [True] * len(mix), partition)
    assert all(item[4] % tile == 0 for item in items.tolist())
    for place, sequence in enumerate(sequences):
        for i in range(sequence.num_rows):
            tokens = covered_tokens(items, place, sequence.row_start + i)
            position = sequence.position_start + i
            first = 0 if window is None else max(0, position - window + 1)
            assert tokens == list(range(tokens[0], tokens[-1] + 1))
            assert tokens[0] <= first
            assert tokens[-1] >= position


def test_items_of_the_same_rows_stand_together_and_know_each_other() -> None:
    num_tokens = torch.tensor([100, 0, 30], dtype=torch.int32)
    items = reference.partition_decodes(num_tokens, Partition(1, 16, 4))
    assert items.shape == (7, split_kv.ITEM_FIELDS)
    assert items[:, 6:].tolist()[:4] == [[3, 0], [3, 0], [3, 0], [1, 3]]
    assert items[4:].count_nonzero() == 0


def test_decodes_come_the_longest_first_whatever_their_places() -> None:
    """Rows stand in the order of their adapters, and a long item that starts last runs alone."""
    num_tokens = torch.tensor([30, 0, 100, 7, 30], dtype=torch.int32)
    items = reference.partition_decodes(num_tokens, Partition(1, 16, 4))
    found = items[:, [0, 1, 2, 3, 6]].tolist()
    assert found[:6] == [
        *[[2, 2, 1, 99, 3]] * 3,
        [0, 0, 1, 29, 1],
        [4, 4, 1, 29, 1],
        [3, 3, 1, 6, 1],
    ]
    assert items[6:].count_nonzero() == 0


def test_short_spans_are_not_cut() -> None:
    """To add the results of several items up takes longer than what they save."""
    sequences = [SequenceRows(0, 8, 92, []), SequenceRows(8, 8, 293, [])]
    items = partition_all(sequences, [True, True], Partition(16, 16, 50, min_split_tokens=150))
    assert items[:, [0, 4, 5, 6]].tolist() == [[1, 0, 160, 2], [1, 160, 301, 2], [0, 0, 100, 1]]


def test_only_members_are_cut() -> None:
    sequences = [SequenceRows(0, 1, 5, []), SequenceRows(1, 9, 0, [])]
    items = partition_all(sequences, [False, True], Partition(16, 16, 8))
    assert items[:, 0].tolist() == [1]


def test_padding_has_no_slot() -> None:
    pages = torch.tensor([[5, 6], [7, 8], [9, 3]], dtype=torch.int32)
    num_tokens = torch.tensor([5, 0, 4], dtype=torch.int32)
    slots = reference.last_slots(num_tokens, pages, LAYOUT)
    assert slots.tolist() == [6 * 4, -1, 9 * 4 + 3]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("splits", "least"), [(1, 1), (3, 1), (50, 1), (50, 100)])
def test_the_device_cuts_as_the_host_does(window: int | None, splits: int, least: int) -> None:
    pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")
    num_tokens = torch.tensor([0, 1, 64, 65, 300, 0], dtype=torch.int32)
    partition = Partition(1, 16, splits, window, min_split_tokens=least)
    actual = split_kv.partition_decodes(num_tokens, partition)
    assert torch.equal(actual, reference.partition_decodes(num_tokens, partition))


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 33, 64])
def test_the_device_has_the_order_of_the_host(num_sequences: int) -> None:
    pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")
    generator = torch.Generator().manual_seed(num_sequences)
    # Many are equal, and some are padding.
    num_tokens = torch.randint(0, 20, (num_sequences,), generator=generator).int() * 9
    partition = Partition(1, 16, 8)
    actual = split_kv.partition_decodes(num_tokens, partition)
    assert torch.equal(actual, reference.partition_decodes(num_tokens, partition))


def test_the_device_finds_the_slots_that_the_host_finds() -> None:
    pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")
    pages = torch.randperm(60).int().view(3, 20)
    num_tokens = torch.tensor([0, 1, 77], dtype=torch.int32)
    expected = reference.last_slots(num_tokens, pages, LAYOUT)
    assert torch.equal(split_kv.last_slots(num_tokens, pages, LAYOUT), expected)
