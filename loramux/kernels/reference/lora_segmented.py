"""Reference of segmented (SGMV) LoRA: one work item after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loramux.kernels.gpu.lora.tables import LoraTables
from loramux.kernels.gpu.lora.work_list import (
    A_ADDRESS,
    ALIGN_ELEMENTS,
    B_ADDRESS,
    BLOCK_INDEX,
    H_START,
    HEADER_WORDS,
    ITEM_WORDS,
    NUM_ROWS,
    RANK_BLOCK,
    ROW_ITEMS,
    ROW_START,
    SLOT,
    TILE_ITEMS,
    WEIGHT,
)
from loramux.kernels.reference.elementwise import activate_mul
from loramux.kernels.reference.fp12 import read_fp12


def resolve(tables: LoraTables, directory: Tensor, slots: Tensor) -> None:
    """Write items[layer, i, projection]: the step's work item i with its addresses there.

    directory int32 [layers, blocks, 4]: addresses of A and B, number of ranks
    slots int32 [slots, 8 projections, 2]: first rank block, number of rank blocks
    """
    num_items = _num_items(tables)
    items = tables.work[HEADER_WORDS:][: num_items * ITEM_WORDS].view(num_items, ITEM_WORDS)
    first, count = slots[items[:, SLOT].long()].unbind(dim=2)
    index = items[:, BLOCK_INDEX, None]
    block = torch.where(index < count, first + index, 0).long()
    found = directory[:, block] * (index < count)[..., None]
    resolved = tables.items[:, :num_items]
    resolved.copy_(items[None, :, None].expand_as(resolved))
    resolved[..., A_ADDRESS] = found[..., 0]
    resolved[..., B_ADDRESS] = found[..., 1]
    resolved[..., NUM_ROWS] = found[..., 2] + (items[:, NUM_ROWS, None] << 16)


def shrink(tables: LoraTables, pool: Tensor, x: Tensor, layer: int, site: int) -> None:
    """partials[h row of i, slice, split] = x[i, split] @ A[split].T for every work item.

    pool [pages, elements]   x [rows, in]
    """
    cut = tables.sites[site]
    for projections in _items(tables, layer):
        for part in range(len(cut.shape.out_features)):
            item = projections[cut.first_projection + part]
            ranks, num_rows = _unpack(item[NUM_ROWS])
            read_a = _fp12_block if tables.is_fp12 else _block
            a = read_a(pool, item[A_ADDRESS], ranks, cut.shape.in_features)
            rows = x[item[ROW_START] : item[ROW_START] + num_rows].float()
            target = tables.partials[item[H_START] : item[H_START] + num_rows, part]
            target.zero_()
            few = max(tables.limits.few_rows, tables.limits.small_rows)
            size = cut.row_k if num_rows <= few else cut.tile_k
            for split, start in enumerate(range(0, cut.shape.in_features, size)):
                columns = slice(start, start + size)
                target[:, split, :ranks] = rows[:, columns] @ a[:, columns].t()


def expand(tables: LoraTables, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
    """y[i] += weight * h[i] @ B for every work item; rows without an adapter stay unchanged.

    pool [pages, elements]   y [rows, out]
    """
    y.copy_(_sum(tables, pool, y, (layer, site), _read_partials(tables)))


def expand_swiglu(  # noqa: PLR0913
    tables: LoraTables, pool: Tensor, y: Tensor, activation: str, layer: int, site: int
) -> Tensor:
    """activation(gate) * up of y as `expand` would leave it, rounded once: [rows, inner].

    pool [pages, elements]   y [rows, 2 * inner], gate first
    """
    total = _sum(tables, pool, y, (layer, site), _read_partials(tables))
    return activate_mul(total, activation).to(y.dtype)


def expand_augmented(tables: LoraTables, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
    """y[i] += weight * h[i] @ B, with h in blocks of 16 columns of y behind its outputs.

    H_START is an item's block of augmented weights.
    pool [pages, elements]   y [rows, out + appended rows]
    """
    outs = tables.sites[site].shape.out_features

    def read(item: list[int], num_rows: int, part: int) -> Tensor:
        start = sum(outs) + (item[H_START] * len(outs) + part) * RANK_BLOCK
        rows = slice(item[ROW_START], item[ROW_START] + num_rows)
        return y[rows, start : start + RANK_BLOCK].float()

    y.copy_(_sum(tables, pool, y, (layer, site), read))


def _read_partials(tables: LoraTables) -> Callable[[list[int], int, int], Tensor]:
    def read(item: list[int], num_rows: int, part: int) -> Tensor:
        start = item[H_START]
        return tables.partials[start : start + num_rows, part].sum(dim=1)

    return read


def _sum(
    tables: LoraTables,
    pool: Tensor,
    y: Tensor,
    at: tuple[int, int],
    read: Callable[[list[int], int, int], Tensor],
) -> Tensor:
    """y plus the deltas of all items, float32."""
    layer, site = at
    cut = tables.sites[site]
    # Sums in float32, rounded once, like the kernels.
    total = y.to(torch.float32, copy=True)
    for projections in _items(tables, layer):
        start = 0
        for part, width in enumerate(cut.shape.out_features):
            item = projections[cut.first_projection + part]
            ranks, num_rows = _unpack(item[NUM_ROWS])
            b = _block(pool, item[B_ADDRESS], ranks, width)
            weight = torch.tensor(item[WEIGHT], dtype=torch.int32).view(torch.float32).item()
            h = read(item, num_rows, part)[:, :ranks] * weight
            rows = slice(item[ROW_START], item[ROW_START] + num_rows)
            total[rows, start : start + width] += h @ b
            start += width
    return total


def _num_items(tables: LoraTables) -> int:
    return int(tables.work[ROW_ITEMS] + tables.work[TILE_ITEMS])


def _items(tables: LoraTables, layer: int) -> list[list[list[int]]]:
    """Return resolved items [items][projections][words]."""
    items: list[list[list[int]]] = tables.items[layer, : _num_items(tables)].tolist()
    return items


def _unpack(shape: int) -> tuple[int, int]:
    """Split a resolved item's NUM_ROWS word into ranks and rows."""
    return shape & 0xFFFF, shape >> 16


def _block(pool: Tensor, address: int, ranks: int, width: int) -> Tensor:
    start = address * ALIGN_ELEMENTS
    return pool.view(-1)[start : start + ranks * width].view(ranks, width).float()


def _fp12_block(pool: Tensor, address: int, ranks: int, width: int) -> Tensor:
    return read_fp12(pool, address * ALIGN_ELEMENTS, ranks, width)
