"""Reference of split-KV partitioning, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from loramux.kernels.gpu.attention.split_kv import ITEM_FIELDS, Partition
from loramux.types.kv import KVLayout


def partition_decodes(num_tokens: Tensor, partition: Partition) -> Tensor:
    """Compute `split_kv.partition_decodes` of the device."""
    num_tokens, order = num_tokens.sort(descending=True, stable=True)
    place = order.int()
    blocks = torch.stack((place, place, (num_tokens > 0).int(), num_tokens - 1), dim=1)
    items = partition_blocks(blocks, partition)
    padded = items.new_zeros(num_tokens.shape[0] + partition.target_splits, ITEM_FIELDS)
    padded[: items.shape[0]] = items
    return padded


def last_slots(num_tokens: Tensor, page_table: Tensor, layout: KVLayout) -> Tensor:
    """Compute `split_kv.last_slots` of the device."""
    block = layout.block_tokens
    position = (num_tokens - 1).clamp(min=0)
    page = page_table.gather(1, (position // block).long()[:, None]).squeeze(1)
    return torch.where(num_tokens > 0, page * block + position % block, -1)


def partition_blocks(blocks: Tensor, partition: Partition) -> Tensor:
    """Partitions blocks [blocks, 4] int32: sequence, first row, rows, position of the first row."""
    rows, position = blocks[:, 2], blocks[:, 3]
    end = (position + rows).masked_fill(rows == 0, 0)
    begin = torch.zeros_like(end)
    if partition.window is not None:
        begin = (position + 1 - partition.window).clamp(min=0).minimum(end)
        begin = begin // partition.tile_tokens * partition.tile_tokens
    size = _item_tokens(end - begin, partition)
    count = _divide_up(end - begin, size)
    first = count.cumsum(0, dtype=torch.int32) - count
    block = torch.repeat_interleave(count)
    part = torch.arange(block.shape[0], dtype=torch.int32, device=block.device) - first[block]
    item_begin = begin[block] + part * size[block]
    item_end = (item_begin + size[block]).minimum(end[block])
    columns = (item_begin, item_end, count[block], first[block])
    return torch.cat((blocks[block], torch.stack(columns, dim=1)), dim=1).int()


def _item_tokens(spans: Tensor, partition: Partition) -> Tensor:
    """Each span is split evenly, into as few work items as the target allows."""
    tile = partition.tile_tokens
    split_tokens = _divide_up(spans.sum(), partition.target_splits).clamp(
        min=partition.min_split_tokens
    )
    split_tokens = _round_up(split_tokens, tile)
    count = _divide_up(spans, split_tokens).clamp(min=1)
    return _round_up(_divide_up(spans, count).clamp(min=1), tile).int()


def _divide_up(value: Tensor, by: Tensor | int) -> Tensor:
    return torch.div(value + (by - 1), by, rounding_mode="floor")


def _round_up(value: Tensor, multiple: int) -> Tensor:
    return _divide_up(value, multiple) * multiple
