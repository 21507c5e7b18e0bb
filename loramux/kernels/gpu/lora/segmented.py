"""Segmented (SGMV) LoRA on a GPU: persistent kernels that take their tiles from a step's work list.

For each site of each layer: the base GEMM, then `shrink`, then `expand`, or for gate_up the
SwiGLU-fused `expand_swiglu`, to which all that follows about `expand` applies. With use_pdl a
kernel launches its successor at once and reads its items and weights before it waits for its
predecessor. So the GEMM must wait for everything written before it and only then launch its
successor, as a launch without PDL and `pdl_wait_and_launch` do. Then the work of `resolve` and of
copies into the page pool is complete when a `shrink` starts, and a kernel behind an `expand` may
read that much, and no more, before its own wait.
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
from loramux.kernels.gpu.lora.shrink import MOST_ROWS, shrink_kernel, shrink_tiles_kernel
from loramux.kernels.gpu.lora.tables import LoraTables
from loramux.kernels.gpu.lora.work_item import (
    A_ADDRESS,
    B_ADDRESS,
    BLOCK_INDEX,
    ENTRY_WORDS,
    HEADER_WORDS,
    ITEM_WORDS,
    NUM_ROWS,
    PROJECTIONS,
    RANGE_WORDS,
    RESOLVED_WORDS,
    ROW_ITEMS,
    SLOT,
    TILE_ITEMS,
)
from loramux.kernels.gpu.lora.work_list import MAX_SLICES, RANK_BLOCK

# Items per iteration of a CTA.
_RESOLVE_ITEMS = 16
# Software pipeline depth of the shrink of a tile.
_SHRINK_STAGES = 3


def resolve(tables: LoraTables, directory: Tensor, slots: Tensor) -> None:
    """Write items[layer, i, projection]: the step's work item i with its addresses there.

    directory int32 [layers, blocks, 4]: addresses of A and B, number of ranks
    slots int32 [slots, 8 projections, 2]: first rank block, number of rank blocks
    """
    num_layers, max_items = tables.items.shape[:2]
    grid = (min(triton.cdiv(max_items, _RESOLVE_ITEMS), tables.num_sms), num_layers)
    _resolve_kernel[grid](
        *(tables.work, directory, slots, tables.items),
        *(directory.stride(0), tables.items.stride(0)),
        BLOCK=_RESOLVE_ITEMS,
        num_warps=4,
    )


def shrink(tables: LoraTables, pool: Tensor, x: Tensor, layer: int, site: int) -> None:
    """partials[h row of i, slice, split] = x[i, split] @ A[split].T for every work item.

    pool [pages, elements]   x [rows, in]
    """
    cut, launch, limits = tables.sites[site], tables.launch, tables.limits
    num_slices = len(cut.shape.out_features)
    buffers = (pool, tables.items, tables.work, x, tables.partials)
    place = (tables.item_start(layer, site), x.stride(0))
    shape = {
        "IN": cut.shape.in_features,
        "SLICES": num_slices,
        "FP12": tables.is_fp12,
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
    if limits.few_rows == 0:
        shrink_tiles_kernel[(most,)](*buffers, *place, **shape)
        return
    few_rows = max(limits.few_rows, limits.small_rows)
    assert few_rows <= MOST_ROWS, "more rows than the MMA has"
    assert tables.is_fp12 or few_rows == limits.few_rows, "small tiles need fp12 on tensor cores"
    ranks = RANK_BLOCK if tables.is_fp12 else launch.row_ranks(cut.row_k, x.itemsize)
    # Enough CTAs for one rank block per row; they loop over more work.
    parts = max(cut.row_splits * RANK_BLOCK // ranks, cut.tile_splits // (limits.few_rows + 1))
    tiles = x.shape[0] * num_slices * parts
    shrink_kernel[(min(most, max(tiles, tables.num_sms)),)](
        *buffers,
        *place,
        **shape,
        ROWS=triton.next_power_of_2(limits.few_rows),
        SMALL=0 if limits.small_rows == 0 else triton.next_power_of_2(limits.small_rows),
        ROW_K=cut.row_k,
        ROW_RANKS=ranks,
        PDL=launch.use_pdl,
        **_pdl(launch.use_pdl),
    )


def expand(tables: LoraTables, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
    """y[i] += weight * h[i] @ B for every work item; rows without an adapter stay unchanged.

    pool [pages, elements]   y [rows, out]
    """
    widths = (*tables.sites[site].shape.out_features, 0, 0)[:MAX_SLICES]
    expand_kernel[_expand_grid(tables, y, widths)](
        pool,
        tables.items,
        tables.work,
        tables.partials,
        y,
        tables.item_start(layer, site),
        y.stride(0),
        *widths,
        **_expand_options(tables, y, site),
    )


def expand_swiglu(  # noqa: PLR0913
    tables: LoraTables, pool: Tensor, y: Tensor, activation: str, layer: int, site: int
) -> Tensor:
    """activation(gate) * up of y as `expand` would leave it: [rows, inner].

    Only rows of the work list are written: those of its items and of its base tiles.
    pool [pages, elements]   y [rows, 2 * inner], gate first
    """
    inner = tables.sites[site].shape.out_features[0]
    out = y.new_empty(len(y), inner)
    expand_swiglu_kernel[_expand_grid(tables, y, (inner,))](
        pool,
        tables.items,
        tables.work,
        tables.partials,
        y,
        out,
        tables.item_start(layer, site),
        y.stride(0),
        INNER=inner,
        ACTIVATION=activation,
        **_expand_options(tables, y, site),
    )
    return out


def _expand_grid(tables: LoraTables, y: Tensor, widths: Sequence[int]) -> tuple[int]:
    """One CTA per tile of the largest work list of these rows, at most as many as are resident."""
    launch = tables.launch
    row_tiles, tiles = (
        sum(triton.cdiv(width, columns) for width in widths)
        for columns in (launch.row_outputs, launch.tile_outputs(y.itemsize))
    )
    tiles = len(y) * max(row_tiles, -(-tiles // (tables.limits.few_rows + 1)))
    return (min(tiles, tables.num_sms * launch.expands_per_sm),)


def _expand_options(tables: LoraTables, y: Tensor, site: int) -> dict[str, Any]:
    cut, launch, limits = tables.sites[site], tables.launch, tables.limits
    assert limits.tile_rows == TILE_ROWS, "a tile has the M of an MMA"
    return {
        "MAX_SPLITS": tables.max_splits,
        "ROW_SPLITS": cut.row_splits,
        "TILE_SPLITS": cut.tile_splits,
        "ROWS": max(1, limits.few_rows),
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
    work, directory, slots, items, directory_stride, item_stride, BLOCK: tl.constexpr
):
    layer = tl.program_id(1)
    num_items = tl.load(work + ROW_ITEMS) + tl.load(work + TILE_ITEMS)
    # One row per item and projection.
    row = tl.arange(0, BLOCK * PROJECTIONS)
    word = tl.arange(0, ITEM_WORDS)[None, :]
    for first in range(tl.program_id(0) * BLOCK, num_items, tl.num_programs(0) * BLOCK):
        index = first + row // PROJECTIONS
        live = index < num_items
        source = work + HEADER_WORDS + index * ITEM_WORDS
        slot = tl.load(source + SLOT, mask=live, other=0)
        block_index = tl.load(source + BLOCK_INDEX, mask=live, other=0)
        blocks = slots + (slot * PROJECTIONS + row % PROJECTIONS) * RANGE_WORDS
        block = tl.load(blocks, mask=live, other=0) + block_index
        has_block = live & (block_index < tl.load(blocks + 1, mask=live, other=0))
        entry = directory + layer * directory_stride + block * ENTRY_WORDS
        a = tl.load(entry, mask=has_block, other=0)
        b = tl.load(entry + 1, mask=has_block, other=0)
        ranks = tl.load(entry + 2, mask=has_block, other=0)
        words = tl.load(source[:, None] + word, mask=live[:, None], other=0)
        words = tl.where(word == A_ADDRESS, a[:, None], words)
        words = tl.where(word == B_ADDRESS, b[:, None], words)
        words = tl.where(word == NUM_ROWS, words * 65536 + ranks[:, None], words)
        target = items + layer.to(tl.int64) * item_stride + first * RESOLVED_WORDS
        tl.store(
            target + row[:, None] * ITEM_WORDS + word,
            words,
            mask=live[:, None],
            eviction_policy="evict_last",
        )
