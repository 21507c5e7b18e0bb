"""Items of a decode step, made on the device from the sequences' lengths: no host in between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.attention.split_kv import ITEM_FIELDS, Cut
from loramux.kernels.gpu.pdl import pdl_options, pdl_wait_and_launch
from loramux.types.model import PagedLayout

_ITEMS_PER_PROGRAM = 16


def cut_decodes(num_tokens: Tensor, cut: Cut, out: Tensor | None = None) -> Tensor:
    """As attention_items.cut_decodes; the shape depends on the number of sequences alone."""
    num_sequences = num_tokens.shape[0]
    num_items = num_sequences + cut.num_shares
    items = num_tokens.new_empty(num_items, ITEM_FIELDS) if out is None else out
    _cut_decodes[(triton.cdiv(num_items, _ITEMS_PER_PROGRAM),)](
        num_tokens,
        items,
        num_sequences,
        num_items,
        cut.num_shares,
        WINDOW=cut.window or 0,
        TILE=cut.tile_tokens,
        LEAST=cut.least_tokens,
        SEQUENCES=triton.next_power_of_2(num_sequences),
        ITEMS=_ITEMS_PER_PROGRAM,
        **pdl_options(num_tokens.device.type),
    )
    return items


def last_slots(
    num_tokens: Tensor, page_table: Tensor, layout: PagedLayout, out: Tensor | None = None
) -> Tensor:
    """As attention_items.last_slots."""
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
def _cut_decodes(  # noqa: PLR0913
    num_tokens_ptr,
    items_ptr,
    num_sequences,
    num_items,
    num_shares,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait_and_launch(PDL)
    index = tl.arange(0, SEQUENCES)
    end = tl.load(num_tokens_ptr + index, mask=index < num_sequences, other=0)
    # The longest first; of equals the first. Padding comes last.
    key = tl.sort(end.to(tl.int64) * SEQUENCES + (SEQUENCES - 1 - index), descending=True)
    end = (key // SEQUENCES).to(tl.int32)
    place = (SEQUENCES - 1 - key % SEQUENCES).to(tl.int32)
    span = end
    if WINDOW > 0:
        span = end - tl.maximum(end - WINDOW, 0) // TILE * TILE
    share = tl.cdiv(tl.maximum(tl.cdiv(tl.sum(span), num_shares), LEAST), TILE) * TILE
    size = tl.maximum(tl.cdiv(span, tl.maximum(tl.cdiv(span, share), 1)), 1)
    size = tl.cdiv(size, TILE) * TILE
    count = tl.cdiv(span, size)
    last = tl.cumsum(count, 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    # The sequences that end before an item are those whose items all stand before it.
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
