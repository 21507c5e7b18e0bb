"""How a step's attention is cut into items of like size, one program and kv head each.

A block of rows of one sequence looks at a span of tokens; long spans are shared by several items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.ops import StepRows
from loramux.types.model import PagedLayout

Ints = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]
ITEM_FIELDS = 8
"""sequence, first row, rows, first row's position, first token, end of tokens,
items of these rows, first of them. An item without rows is padding."""


@dataclass(frozen=True, slots=True)
class Cut:
    rows: int
    """Rows of a sequence in one item, at most."""
    tile_tokens: int
    """Items begin at multiples of this, and end there but for the last of a span."""
    num_shares: int
    """A span is cut where it is longer than this part of all spans together."""
    window: int | None = None
    least_tokens: int = 1
    """And where it is longer than this: to add up what several items found costs time as well."""


def cut_sequences(rows: StepRows, members: Flags, cut: Cut) -> Tensor:
    """[items, ITEM_FIELDS] int32 on the CPU, of the sequences that are members.

    A sequence's place among all of them is its row in the page table. In numpy: the host does this
    while the device waits, and calls of torch cost several times as much.
    """
    places = np.flatnonzero(members)
    lengths = rows.lengths[places]
    counts = -(-lengths // cut.rows)
    owner = np.repeat(np.arange(len(places)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * cut.rows
    place = places[owner]
    num_rows = np.minimum(cut.rows, lengths[owner] - first)
    position = rows.positions[place] + first
    end = position + num_rows
    # The longest first: a long item that starts last keeps one multiprocessor busy alone.
    order = np.argsort(-end, kind="stable")
    blocks = (place[order], rows.row_starts[place[order]] + first[order], num_rows[order])
    return torch.from_numpy(_cut_spans(blocks, position[order], end[order], cut))


def _cut_spans(blocks: tuple[Ints, Ints, Ints], position: Ints, end: Ints, cut: Cut) -> Ints:
    """As cut_blocks; blocks are (sequence, first row, rows), none without rows."""
    begin = np.zeros_like(end)
    if cut.window is not None:
        begin = np.minimum(np.maximum(position + 1 - cut.window, 0), end)
        begin = begin // cut.tile_tokens * cut.tile_tokens
    spans, tile = end - begin, cut.tile_tokens
    share = max(cut.least_tokens, -(-int(spans.sum()) // cut.num_shares))
    share = -(-share // tile) * tile
    size = -(-spans // np.maximum(-(-spans // share), 1))
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


def cut_decodes(num_tokens: Tensor, cut: Cut) -> Tensor:
    """As cut_sequences, for one row per sequence: row i is at position num_tokens[i] - 1.

    num_tokens [sequences] int32, 0 for a row that is padding
    -> [sequences + num_shares, ITEM_FIELDS] int32, with padding items at the end
    """
    num_tokens, order = num_tokens.sort(descending=True, stable=True)
    place = order.int()
    blocks = torch.stack((place, place, (num_tokens > 0).int(), num_tokens - 1), dim=1)
    items = cut_blocks(blocks, cut)
    padded = items.new_zeros(num_tokens.shape[0] + cut.num_shares, ITEM_FIELDS)
    padded[: items.shape[0]] = items
    return padded


def last_slots(num_tokens: Tensor, page_table: Tensor, layout: PagedLayout) -> Tensor:
    """page * block_tokens + token of each sequence's last token; -1 for padding.

    num_tokens [sequences] int32   page_table [sequences, pages] int32 -> [sequences] int32
    """
    block = layout.block_tokens
    position = (num_tokens - 1).clamp(min=0)
    page = page_table.gather(1, (position // block).long()[:, None]).squeeze(1)
    return torch.where(num_tokens > 0, page * block + position % block, -1)


def cut_blocks(blocks: Tensor, cut: Cut) -> Tensor:
    """blocks [blocks, 4] int32: sequence, first row, rows, position of the first row."""
    rows, position = blocks[:, 2], blocks[:, 3]
    end = (position + rows).masked_fill(rows == 0, 0)
    begin = torch.zeros_like(end)
    if cut.window is not None:
        begin = (position + 1 - cut.window).clamp(min=0).minimum(end)
        begin = begin // cut.tile_tokens * cut.tile_tokens
    size = _item_tokens(end - begin, cut)
    count = _divide_up(end - begin, size)
    first = count.cumsum(0, dtype=torch.int32) - count
    block = torch.repeat_interleave(count)
    part = torch.arange(block.shape[0], dtype=torch.int32, device=block.device) - first[block]
    item_begin = begin[block] + part * size[block]
    item_end = (item_begin + size[block]).minimum(end[block])
    columns = (item_begin, item_end, count[block], first[block])
    return torch.cat((blocks[block], torch.stack(columns, dim=1)), dim=1).int()


def _item_tokens(spans: Tensor, cut: Cut) -> Tensor:
    """Each span is cut evenly, into as few items as the share allows."""
    tile = cut.tile_tokens
    share = _divide_up(spans.sum(), cut.num_shares).clamp(min=cut.least_tokens)
    share = _round_up(share, tile)
    count = _divide_up(spans, share).clamp(min=1)
    return _round_up(_divide_up(spans, count).clamp(min=1), tile).int()


def _divide_up(value: Tensor, by: Tensor | int) -> Tensor:
    return torch.div(value + (by - 1), by, rounding_mode="floor")


def _round_up(value: Tensor, multiple: int) -> Tensor:
    return _divide_up(value, multiple) * multiple
