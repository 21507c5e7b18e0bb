"""LoRA on a GPU: persistent kernels that take their tiles from a step's work list.

For each site of each layer: the base's matrix product, then `shrink`, then `expand`, or for gate
and up `expand_swiglu`, of which all that is said of an `expand` holds. With use_pdl a kernel lets
its successor start at once and, before it waits for its predecessor, reads its records and weights.
So the product must wait for all that was written before it, and only then let a successor start,
as a launch without PDL and `pdl_wait_and_launch` do. Then that much (from `resolve`, from a copy
of an adapter's pages) is complete when a `shrink` starts, and a kernel behind an `expand` may read
it, and no more, before its own wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.lora.expand import expand_kernel
from loramux.kernels.gpu.lora.expand_mma import TILE_ROWS
from loramux.kernels.gpu.lora.expand_swiglu import expand_swiglu_kernel
from loramux.kernels.gpu.lora.shrink import shrink_kernel, shrink_tiles_kernel
from loramux.kernels.gpu.lora.shrink_fp12 import MOST_FEW_ROWS
from loramux.kernels.gpu.lora.tables import LoraTables
from loramux.kernels.gpu.lora.work_list import MAX_SLICES, RANK_BLOCK

_RESOLVE_UNITS = 16
# Of reads under way in the shrink of a tile of rows.
_SHRINK_STAGES = 3


def resolve(tables: LoraTables, directory: Tensor, slots: Tensor) -> None:
    """records[layer, i, projection] = the step's unit i with its addresses there.

    directory int32 [layers, groups, 4]: addresses of A and B, number of ranks
    slots int32 [slots, 8 projections, 2]: first group, number of groups
    """
    num_layers, max_items = tables.records.shape[:2]
    grid = (min(triton.cdiv(max_items, _RESOLVE_UNITS), tables.num_sms), num_layers)
    _resolve_kernel[grid](
        tables.work,
        directory,
        slots,
        tables.records,
        directory.stride(0),
        tables.records.stride(0),
        BLOCK=_RESOLVE_UNITS,
        num_warps=4,
    )


def shrink(tables: LoraTables, pool: Tensor, x: Tensor, layer: int, site: int) -> None:
    """partials[h of row i, slice, split] = x[i, split] @ A[split].T for every unit.

    pool [pages, elements]   x [rows, in]
    """
    cut, launch, limits = tables.sites[site], tables.launch, tables.limits
    num_slices = len(cut.shape.out_features)
    buffers = (pool, tables.records, tables.work, x, tables.partials)
    place = (tables.record_start(layer, site), x.stride(0))
    shape = {
        "IN": cut.shape.in_features,
        "SLICES": num_slices,
        "SHORT": tables.is_fp12,
        "TILE_K": cut.tile_k,
        "STEP_K": launch.step_k,
        "STAGES": _SHRINK_STAGES,
        "TILE_M": limits.tile_rows,
        "MAX_SPLITS": tables.max_splits,
        "COMPILED": x.is_cuda,
        "num_warps": launch.shrink_warps,
        "maxnreg": launch.shrink_registers,
    }
    most = tables.num_sms * launch.shrinks_per_sm
    if limits.alone_rows == 0:
        shrink_tiles_kernel[(most,)](*buffers, *place, **shape)
        return
    few_rows = max(limits.alone_rows, limits.small_rows)
    assert few_rows <= MOST_FEW_ROWS, "more rows than a product has"
    assert tables.is_fp12 or few_rows == limits.alone_rows, "small tiles are for matrix units"
    ranks = RANK_BLOCK if tables.is_fp12 else launch.row_ranks(cut.row_k, x.itemsize)
    # Enough programs for one group of ranks per row; more work is looped over.
    parts = max(cut.row_splits * RANK_BLOCK // ranks, cut.tile_splits // (limits.alone_rows + 1))
    tiles = x.shape[0] * num_slices * parts
    shrink_kernel[(min(most, max(tiles, tables.num_sms)),)](
        *buffers,
        *place,
        **shape,
        ROWS=triton.next_power_of_2(limits.alone_rows),
        SMALL=0 if limits.small_rows == 0 else triton.next_power_of_2(limits.small_rows),
        ROW_K=cut.row_k,
        ROW_RANKS=ranks,
        PDL=launch.use_pdl,
        **_pdl(launch.use_pdl),
    )


def expand(tables: LoraTables, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
    """y[i] += weight * h[i] @ B for every unit; rows without an adapter stay.

    pool [pages, elements]   y [rows, out]
    """
    widths = (*tables.sites[site].shape.out_features, 0, 0)[:MAX_SLICES]
    expand_kernel[_expand_grid(tables, y, widths)](
        pool,
        tables.records,
        tables.work,
        tables.partials,
        y,
        tables.record_start(layer, site),
        y.stride(0),
        *widths,
        **_expand_options(tables, y, site),
    )


def expand_swiglu(  # noqa: PLR0913
    tables: LoraTables, pool: Tensor, y: Tensor, activation: str, layer: int, site: int
) -> Tensor:
    """activation(gate) * up of y as `expand` would leave it: [rows, inner]

    Of rows that the list names: its adapters', and the base's if it has them.
    pool [pages, elements]   y [rows, gate and up side by side]
    """
    inner = tables.sites[site].shape.out_features[0]
    out = y.new_empty(len(y), inner)
    expand_swiglu_kernel[_expand_grid(tables, y, (inner,))](
        pool,
        tables.records,
        tables.work,
        tables.partials,
        y,
        out,
        tables.record_start(layer, site),
        y.stride(0),
        INNER=inner,
        ACTIVATION=activation,
        **_expand_options(tables, y, site),
    )
    return out


def _expand_grid(tables: LoraTables, y: Tensor, widths: Sequence[int]) -> tuple[int]:
    """The most work that these rows can be, each alone with its adapter or all in small tiles; or
    as many programs as run at once."""
    launch = tables.launch
    row_tiles, tiles = (
        sum(triton.cdiv(width, columns) for width in widths)
        for columns in (launch.row_outputs, launch.tile_outputs(y.itemsize))
    )
    tiles = len(y) * max(row_tiles, -(-tiles // (tables.limits.alone_rows + 1)))
    return (min(tiles, tables.num_sms * launch.expands_per_sm),)


def _expand_options(tables: LoraTables, y: Tensor, site: int) -> dict[str, Any]:
    cut, launch, limits = tables.sites[site], tables.launch, tables.limits
    assert limits.tile_rows == TILE_ROWS, "a tile is what matrix units take at once"
    return {
        "MAX_SPLITS": tables.max_splits,
        "ROW_SPLITS": cut.row_splits,
        "TILE_SPLITS": cut.tile_splits,
        "ROWS": max(1, limits.alone_rows),
        "SMALL_ROWS": limits.small_rows,
        "ROW_N": launch.row_outputs,
        "WARPS": launch.expand_warps,
        "J": launch.tile_outputs(y.itemsize) // (8 * launch.expand_warps),
        "PDL": launch.use_pdl,
        "num_warps": launch.expand_warps,
        "maxnreg": launch.expand_registers,
        **_pdl(launch.use_pdl),
    }


def _pdl(use_pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if use_pdl else {}


@triton.jit
def _resolve_kernel(  # noqa: PLR0913
    work, directory, slots, records, directory_stride, record_stride, BLOCK: tl.constexpr
):
    layer = tl.program_id(1)
    num_units = tl.load(work + 1) + tl.load(work + 3)
    # A row of a block is a unit at one projection.
    row = tl.arange(0, BLOCK * 8)
    word = tl.arange(0, 8)[None, :]
    for first in range(tl.program_id(0) * BLOCK, num_units, tl.num_programs(0) * BLOCK):
        unit = first + row // 8
        live = unit < num_units
        source = work + 16 + unit * 8
        slot = tl.load(source, mask=live, other=0)
        chain = tl.load(source + 1, mask=live, other=0)
        found = slots + slot * 16 + (row % 8) * 2
        group = tl.load(found, mask=live, other=0) + chain
        has_group = live & (chain < tl.load(found + 1, mask=live, other=0))
        entry = directory + layer * directory_stride + group * 4
        a = tl.load(entry, mask=has_group, other=0)
        b = tl.load(entry + 1, mask=has_group, other=0)
        ranks = tl.load(entry + 2, mask=has_group, other=0)
        words = tl.load(source[:, None] + word, mask=live[:, None], other=0)
        words = tl.where(word == 0, a[:, None], words)
        words = tl.where(word == 1, b[:, None], words)
        words = tl.where(word == 2, words * 65536 + ranks[:, None], words)
        target = records + layer.to(tl.int64) * record_stride + first * 64
        tl.store(
            target + row[:, None] * 8 + word,
            words,
            mask=live[:, None],
            eviction_policy="evict_last",
        )
