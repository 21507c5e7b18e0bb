"""Split-KV: partitions a step's attention into work items of similar size.

A block of rows of one sequence attends to a span of tokens; a long span is split between several
work items, each for one CTA per KV head. Steps are partitioned on the host, decodes of a CUDA
graph on the device, from the sequences' lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.gpu.pdl import pdl_options, pdl_wait_and_launch
from loramux.kernels.ops import StepRows
from loramux.types.kv import KVLayout

Ints = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]
ITEM_FIELDS = 8
"""sequence, first row, rows, position of the first row, first token, end of tokens, splits of these
rows, first of these splits. An item without rows is padding."""
_ITEMS_PER_CTA = 16


@dataclass(frozen=True, slots=True)
class Partition:
    rows: int
    """Most rows of a sequence in one work item."""
    tile_tokens: int
    """Work items begin at multiples of this; all but the last of a span end there."""
    target_splits: int
    """A span is split where it exceeds all spans' tokens divided by this."""
    window: int | None = None
    min_split_tokens: int = 1
    """Shorter spans are not split: the reduction costs time as well."""


def partition_sequences(rows: StepRows, members: Flags, partition: Partition) -> Tensor:
    """[items, ITEM_FIELDS] int32 on the CPU, for the sequences that are members.

    A sequence's index is its row in the page table. In numpy, since the device waits for this and
    calls of torch cost several times as much.
    """
    places = np.flatnonzero(members)
    lengths = rows.lengths[places]
    counts = -(-lengths // partition.rows)
    owner = np.repeat(np.arange(len(places)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * partition.rows
    place = places[owner]
    num_rows = np.minimum(partition.rows, lengths[owner] - first)
    position = rows.positions[place] + first
    end = position + num_rows
    # Longest first: a long item that starts last would run alone on one SM.
    order = np.argsort(-end, kind="stable")
    blocks = (place[order], rows.row_starts[place[order]] + first[order], num_rows[order])
    return torch.from_numpy(_partition_spans(blocks, position[order], end[order], partition))


def _partition_spans(
    blocks: tuple[Ints, Ints, Ints], position: Ints, end: Ints, partition: Partition
) -> Ints:
    """blocks: (sequence, first row, rows), none without rows"""
    begin = np.zeros_like(end)
    if partition.window is not None:
        begin = np.minimum(np.maximum(position + 1 - partition.window, 0), end)
        begin = begin // partition.tile_tokens * partition.tile_tokens
    spans, tile = end - begin, partition.tile_tokens
    split_tokens = max(partition.min_split_tokens, -(-int(spans.sum()) // partition.target_splits))
    split_tokens = -(-split_tokens // tile) * tile
    size = -(-spans // np.maximum(-(-spans // split_tokens), 1))
    size = -(-np.maximum(size, 1) // tile) * tile
    count = -(-spans // size)
    first = np.cumsum(count) - count
    block = np.repeat(np.arange(len(count)), count)
    items = np.empty((len(block), ITEM_FIELDS), dtype=np.int32)
    item_begin = begin[block] + (np.arange(len(block)) - first[block]) * size[block]
    item_end = np.minimum(item_begin + size[block], end[block])
    columns = (*blocks, position)
    for place, column in enumerate((*(c[block] for c in columns), item_begin, item_end)):
        items[:, place] = column
    items[:, 6], items[:, 7] = count[block], first[block]
    return items


def partition_decodes(
    num_tokens: Tensor, partition: Partition, out: Tensor | None = None
) -> Tensor:
    """One work item or more per sequence, for one row each: row i is at num_tokens[i] - 1.

    num_tokens [sequences] int32, 0 for padding
    -> [sequences + target_splits, ITEM_FIELDS] int32, with padding items at the end
    """
    num_sequences = num_tokens.shape[0]
    num_items = num_sequences + partition.target_splits
    items = num_tokens.new_empty(num_items, ITEM_FIELDS) if out is None else out
    _partition_decodes[(triton.cdiv(num_items, _ITEMS_PER_CTA),)](
        num_tokens,
        items,
        num_sequences,
        num_items,
        partition.target_splits,
        WINDOW=partition.window or 0,
        TILE=partition.tile_tokens,
        MIN_SPLIT=partition.min_split_tokens,
        SEQUENCES=triton.next_power_of_2(num_sequences),
        ITEMS=_ITEMS_PER_CTA,
        **pdl_options(num_tokens.device.type),
    )
    return items


def last_slots(
    num_tokens: Tensor, page_table: Tensor, layout: KVLayout, out: Tensor | None = None
) -> Tensor:
    """KV slot of each sequence's last token, -1 for padding: [sequences] int32.

    num_tokens [sequences] int32   page_table [sequences, pages] int32
    """
    num_sequences = num_tokens.shape[0]
    slots = torch.empty_like(num_tokens) if out is None else out
    _last_slots[(1,)](
        num_tokens,
        page_table,
        slots,
        num_sequences,
        page_table.stride(0),
        BLOCK_TOKENS=layout.block_tokens,
        SEQUENCES=triton.next_power_of_2(num_sequences),
        **pdl_options(num_tokens.device.type),
    )
    return slots


@triton.jit
def _last_slots(  # noqa: PLR0913
    num_tokens_ptr,
    page_table_ptr,
    slots_ptr,
    num_sequences,
    page_table_stride,
    BLOCK_TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait_and_launch(PDL)
    place = tl.arange(0, SEQUENCES)
    inside = place < num_sequences
    num_tokens = tl.load(num_tokens_ptr + place, mask=inside, other=0)
    position = tl.maximum(num_tokens - 1, 0)
    at = place.to(tl.int64) * page_table_stride + position // BLOCK_TOKENS
    page = tl.load(page_table_ptr + at, mask=inside & (num_tokens > 0), other=0)
    slot = page * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(slots_ptr + place, tl.where(num_tokens > 0, slot, -1), mask=inside)


@triton.jit
def _partition_decodes(  # noqa: PLR0913
    num_tokens_ptr,
    items_ptr,
    num_sequences,
    num_items,
    target_splits,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait_and_launch(PDL)
    index = tl.arange(0, SEQUENCES)
    end = tl.load(num_tokens_ptr + index, mask=index < num_sequences, other=0)
    # Longest first, ties by index; padding comes last.
    key = tl.sort(end.to(tl.int64) * SEQUENCES + (SEQUENCES - 1 - index), descending=True)
    end = (key // SEQUENCES).to(tl.int32)
    place = (SEQUENCES - 1 - key % SEQUENCES).to(tl.int32)
    span = end
    if WINDOW > 0:
        span = end - tl.maximum(end - WINDOW, 0) // TILE * TILE
    split_tokens = tl.cdiv(tl.maximum(tl.cdiv(tl.sum(span), target_splits), MIN_SPLIT), TILE) * TILE
    size = tl.maximum(tl.cdiv(span, tl.maximum(tl.cdiv(span, split_tokens), 1)), 1)
    size = tl.cdiv(size, TILE) * TILE
    count = tl.cdiv(span, size)
    last = tl.cumsum(count, 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    # The sequences before an item's are those whose items all come before it.
    nth = tl.sum((last[None, :] <= item[:, None]).to(tl.int32), axis=1)
    is_item = item < tl.sum(count)
    own = index[None, :] == nth[:, None]
    sequence = tl.sum(tl.where(own, place[None, :], 0), axis=1)
    item_end = tl.sum(tl.where(own, end[None, :], 0), axis=1)
    item_span = tl.sum(tl.where(own, span[None, :], 0), axis=1)
    item_size = tl.sum(tl.where(own, size[None, :], 0), axis=1)
    item_count = tl.sum(tl.where(own, count[None, :], 0), axis=1)
    first = tl.sum(tl.where(own, last[None, :], 0), axis=1) - item_count
    begin = item_end - item_span + (item - first) * item_size

    target = items_ptr + item * 8
    inside = item < num_items
    tl.store(target, tl.where(is_item, sequence, 0), mask=inside)
    tl.store(target + 1, tl.where(is_item, sequence, 0), mask=inside)
    tl.store(target + 2, is_item.to(tl.int32), mask=inside)
    tl.store(target + 3, tl.where(is_item, item_end - 1, 0), mask=inside)
    tl.store(target + 4, tl.where(is_item, begin, 0), mask=inside)
    tl.store(target + 5, tl.where(is_item, tl.minimum(begin + item_size, item_end), 0), mask=inside)
    tl.store(target + 6, tl.where(is_item, item_count, 0), mask=inside)
    tl.store(target + 7, tl.where(is_item, first, 0), mask=inside)
