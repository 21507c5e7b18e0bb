"""Reference of the LoRA kernels that read a step's work list: one unit after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loramux.kernels.gpu.lora.tables import LoraTables
from loramux.kernels.gpu.lora.work_list import (
    A_ADDRESS,
    ALIGN_ELEMENTS,
    B_ADDRESS,
    CHAIN,
    H_START,
    HEADER_WORDS,
    NUM_ROWS,
    RANK_BLOCK,
    ROW_START,
    ROW_UNITS,
    SLOT,
    TILE_UNITS,
    UNIT_WORDS,
    WEIGHT,
)
from loramux.kernels.reference.elementwise import activate_mul
from loramux.kernels.reference.fp12 import read_fp12


def resolve(tables: LoraTables, directory: Tensor, slots: Tensor) -> None:
    """records[layer, i, projection] = the step's unit i with its addresses there.

    directory int32 [layers, groups, 4]: addresses of A and B, number of ranks
    slots int32 [slots, 8 projections, 2]: first group, number of groups
    """
    num_units = _num_units(tables)
    units = tables.work[HEADER_WORDS:][: num_units * UNIT_WORDS].view(num_units, UNIT_WORDS)
    first, count = slots[units[:, SLOT].long()].unbind(dim=2)
    chain = units[:, CHAIN, None]
    group = torch.where(chain < count, first + chain, 0).long()
    found = directory[:, group] * (chain < count)[..., None]
    records = tables.records[:, :num_units]
    records.copy_(units[None, :, None].expand_as(records))
    records[..., A_ADDRESS] = found[..., 0]
    records[..., B_ADDRESS] = found[..., 1]
    records[..., NUM_ROWS] = found[..., 2] + (units[:, NUM_ROWS, None] << 16)


def shrink(tables: LoraTables, pool: Tensor, x: Tensor, layer: int, site: int) -> None:
    """partials[h of row i, slice, split] = x[i, split] @ A[split].T for every unit.

    pool [pages, elements]   x [rows, in]
    """
    cut = tables.sites[site]
    for unit in _units(tables, layer):
        for part in range(len(cut.shape.out_features)):
            record = unit[cut.first_projection + part]
            ranks, num_rows = _unpack(record[NUM_ROWS])
            read_a = _short_block if tables.is_fp12 else _block
            a = read_a(pool, record[A_ADDRESS], ranks, cut.shape.in_features)
            rows = x[record[ROW_START] : record[ROW_START] + num_rows].float()
            target = tables.partials[record[H_START] : record[H_START] + num_rows, part]
            target.zero_()
            few = max(tables.limits.alone_rows, tables.limits.small_rows)
            size = cut.row_k if num_rows <= few else cut.tile_k
            for split, start in enumerate(range(0, cut.shape.in_features, size)):
                columns = slice(start, start + size)
                target[:, split, :ranks] = rows[:, columns] @ a[:, columns].t()


def expand(tables: LoraTables, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
    """y[i] += weight * h[i] @ B for every unit; rows without an adapter stay.

    pool [pages, elements]   y [rows, out]
    """
    y.copy_(_sum(tables, pool, y, (layer, site), _read_partials(tables)))


def expand_swiglu(  # noqa: PLR0913
    tables: LoraTables, pool: Tensor, y: Tensor, activation: str, layer: int, site: int
) -> Tensor:
    """activation(gate) * up of y as `expand` would leave it, rounded once: [rows, inner]

    pool [pages, elements]   y [rows, gate and up side by side]
    """
    total = _sum(tables, pool, y, (layer, site), _read_partials(tables))
    return activate_mul(total, activation).to(y.dtype)


def expand_augmented(tables: LoraTables, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
    """As expand, with h in blocks of 16 columns of y behind its outputs, slice by slice.

    H_START is a unit's block.   pool [pages, elements]   y [rows, out + tail]
    """
    outs = tables.sites[site].shape.out_features

    def read(record: list[int], num_rows: int, part: int) -> Tensor:
        start = sum(outs) + (record[H_START] * len(outs) + part) * RANK_BLOCK
        rows = slice(record[ROW_START], record[ROW_START] + num_rows)
        return y[rows, start : start + RANK_BLOCK].float()

    y.copy_(_sum(tables, pool, y, (layer, site), read))


def _read_partials(tables: LoraTables) -> Callable[[list[int], int, int], Tensor]:
    def read(record: list[int], num_rows: int, part: int) -> Tensor:
        start = record[H_START]
        return tables.partials[start : start + num_rows, part].sum(dim=1)

    return read


def _sum(
    tables: LoraTables,
    pool: Tensor,
    y: Tensor,
    place: tuple[int, int],
    read: Callable[[list[int], int, int], Tensor],
) -> Tensor:
    """y with all that is added to it, float32"""
    layer, site = place
    cut = tables.sites[site]
    # Sums in float32, rounded once, as the fast twin does.
    total = y.to(torch.float32, copy=True)
    for unit in _units(tables, layer):
        start = 0
        for part, width in enumerate(cut.shape.out_features):
            record = unit[cut.first_projection + part]
            ranks, num_rows = _unpack(record[NUM_ROWS])
            b = _block(pool, record[B_ADDRESS], ranks, width)
            weight = torch.tensor(record[WEIGHT], dtype=torch.int32).view(torch.float32).item()
            h = read(record, num_rows, part)[:, :ranks] * weight
            rows = slice(record[ROW_START], record[ROW_START] + num_rows)
            total[rows, start : start + width] += h @ b
            start += width
    return total


def _num_units(tables: LoraTables) -> int:
    return int(tables.work[ROW_UNITS] + tables.work[TILE_UNITS])


def _units(tables: LoraTables, layer: int) -> list[list[list[int]]]:
    """[units][projections][words]"""
    units: list[list[list[int]]] = tables.records[layer, : _num_units(tables)].tolist()
    return units


def _unpack(shape: int) -> tuple[int, int]:
    """Ranks and rows."""
    return shape & 0xFFFF, shape >> 16


def _block(pool: Tensor, address: int, ranks: int, width: int) -> Tensor:
    start = address * ALIGN_ELEMENTS
    return pool.view(-1)[start : start + ranks * width].view(ranks, width).float()


def _short_block(pool: Tensor, address: int, ranks: int, width: int) -> Tensor:
    return read_fp12(pool, address * ALIGN_ELEMENTS, ranks, width)
