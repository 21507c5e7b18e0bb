"""Adapters whose A is in the tail of the base weights: B is added by kernels that run anyway.

y with its adapters stays in float32 until a kernel stores what it makes of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.gemm.small_m import MOST_ROWS
from loramux.kernels.gpu.lora.fp12 import FP12_SCALE, load_planes, unpack_fp12
from loramux.kernels.gpu.lora_augmented.rotary_tiles import rotate_tiles_kernel
from loramux.kernels.gpu.lora_augmented.rows import (
    activate_mul_kernel,
    add_norm_kernel,
    rotate_write_kernel,
)
from loramux.kernels.gpu.lora_augmented.tables import AugmentedSite, AugmentedWeights
from loramux.kernels.gpu.lora_augmented.tiles import activate_tiles_kernel, expand_kernel
from loramux.kernels.gpu.pdl import LANES_FIRST, axis, pdl_options
from loramux.kernels.ops import KVTarget, Norm, Rotation

_COPY_BLOCK = 1024
_MIN_DOT = 16
# Outputs of a program that has a tile.
_TILE_COLUMNS = 128
# Of a thread that activates a tile: with more, fewer programs run at once.
_ACTIVATE_REGISTERS = 128
# Of a number that matrix units multiply; others are multiplied one by one, in more registers.
_SHORT_BYTES = 2


def copy_block(  # noqa: PLR0913
    store: AugmentedWeights,
    pool: Tensor,
    directory: Tensor,
    slots: Tensor,
    *,
    rank_block: tuple[int, int],
    block: int,
) -> None:
    """Block `block` of every tail becomes A of one group of ranks: (slot, place in its chain).

    What the adapter leaves alone is zero.   pool [pages, elements]
    directory int32 [layers, groups, 4]   slots int32 [slots, 8 projections, 2]
    """
    num_layers, num_projections = store.places.shape
    slot, chain = rank_block
    copy, rows = (_copy_short_block, 8) if store.is_fp12 else (_copy_block, 1)
    copy[(16 // rows, num_projections, num_layers)](
        *(pool, directory, slots, store.places, store.shapes, directory.stride(0)),
        *(slot, chain, block),
        BLOCK=_COPY_BLOCK,
        ALIGN=store.alignment,
        COMPILED=pool.is_cuda,
        num_warps=4,
    )


def add_norm(
    y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, lora: AugmentedSite
) -> Tensor:
    """fused's add_norm of y with its adapters. y [rows, outputs + tail]

    y may be parts of the product, contiguous float32 [parts, rows, outputs + tail]
    """
    num_rows, size = residual.shape
    out = torch.empty_like(residual)
    tables = lora.tables
    add_norm_kernel[(num_rows,)](
        *(y, residual, norm.weight, None if after is None else after.weight, out),
        *(lora.pool, tables.records, tables.work, lora.record_start, y.stride(-2)),
        *(norm.eps, norm.eps if after is None else after.eps, tables.limits.row_map_start),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PARTS=1 if y.ndim == 2 else len(y),
        num_warps=lora.launch.norm_warps,
        **pdl_options(y.device.type),
    )
    return out


def expand(y: Tensor, lora: AugmentedSite) -> Tensor:
    """y with its adapters [rows, outputs], in place; for a site of one projection.

    y [rows, outputs + tail], or its parts, contiguous float32 [parts, rows, outputs + tail],
    which stay
    """
    num_rows, size = y.shape[-2], lora.num_outputs
    tables = lora.tables
    out = y[:, :size] if y.ndim == 2 else lora.pool.new_empty(num_rows, size)
    options = _tile_options(lora, y, min(_TILE_COLUMNS, triton.next_power_of_2(size)))
    num_columns = 8 * options["WARPS"] * options["J"]
    expand_kernel[(triton.cdiv(size, num_columns), lora.max_tiles(num_rows))](
        *(y, out, lora.pool, tables.records, tables.work, lora.record_start, num_rows),
        *(y.stride(-2), out.stride(0)),
        SIZE=size,
        PARTS=1 if y.ndim == 2 else len(y),
        **options,
        **pdl_options(y.device.type),
    )
    return out


def rotate_write(y: Tensor, rotation: Rotation, target: KVTarget, lora: AugmentedSite) -> Tensor:
    """fused's rotate_write of y with its adapters. y [rows, outputs + tail]"""
    layout, num_rows = target.layout, y.shape[0]
    num_heads = lora.num_outputs // layout.head_dim
    num_queries = num_heads - 2 * layout.num_kv_heads
    norm, tables = rotation.head_norm, lora.tables
    half = max(_MIN_DOT, triton.next_power_of_2(layout.head_dim // 2))
    kernel, options = rotate_write_kernel, {"HALF": half, "num_warps": lora.launch.rotate_warps}
    if lora.launch.tile_rows > 1:
        kernel, options = rotate_tiles_kernel, _tile_options(lora, y, half)
    kernel[(num_heads, lora.max_tiles(num_rows))](
        *(y, rotation.cos, rotation.sin, target.storage, target.slots),
        *(None if norm is None else norm.weight, lora.pool, tables.records, tables.work),
        *(lora.record_start, y.stride(0), target.storage.stride(0)),
        target.layer * 2 * layout.block_tokens * layout.num_kv_heads * layout.head_dim,
        0.0 if norm is None else norm.eps,
        NUM_QUERIES=num_queries,
        KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        BLOCK_TOKENS=layout.block_tokens,
        **options,
        **pdl_options(y.device.type),
    )
    return y[:, : num_queries * layout.head_dim].view(num_rows, num_queries, layout.head_dim)


def activate_mul(y: Tensor, activation: str, lora: AugmentedSite) -> Tensor:
    """fused's activate_mul of y with its adapters. y [rows, outputs + tail]"""
    num_rows, inner = y.shape[0], lora.num_outputs // 2
    out = y.new_empty(num_rows, inner)
    tables = lora.tables
    block = min(lora.launch.activate_n, triton.next_power_of_2(inner))
    kernel, options = activate_mul_kernel, {"BLOCK": block, "num_warps": lora.launch.activate_warps}
    if lora.launch.tile_rows > 1:
        options = _tile_options(lora, y, min(_TILE_COLUMNS, triton.next_power_of_2(inner)))
        kernel, block = activate_tiles_kernel, 8 * options["WARPS"] * options["J"]
        if y.itemsize == _SHORT_BYTES:
            options["maxnreg"] = _ACTIVATE_REGISTERS
    kernel[(triton.cdiv(inner, block), lora.max_tiles(num_rows))](
        *(y, out, lora.pool, tables.records, tables.work, lora.record_start, y.stride(0)),
        INNER=inner,
        ACTIVATION=activation,
        **options,
        **pdl_options(y.device.type),
    )
    return out


def _tile_options(lora: AugmentedSite, y: Tensor, num_columns: int) -> dict[str, int]:
    """Of a launch whose programs have a tile and num_columns, a power of two, or more."""
    num_columns = max(_MIN_DOT, num_columns)
    # Of a lane: as many as it reads at once.
    per_lane = min(num_columns // 8, 16 // y.itemsize)
    num_warps = num_columns // (8 * per_lane)
    return {
        "WARPS": num_warps,
        "J": per_lane,
        "LOOPS": lora.launch.tile_rows > 16,
        "EARLY_B": _reads_b_early(y.shape[-2]),
        "num_warps": num_warps,
    }


def _reads_b_early(num_rows: int) -> bool:
    """Whether the product ahead lets a kernel start that reads B while it still runs.

    Behind other products B is asked for together with y: what matrix units multiply is waited for
    before anything that is asked for later.
    """
    return num_rows <= MOST_ROWS


# A kernel is compiled once, not for every slot that is a multiple of 16.
@triton.jit
def _find_copy(
    directory, slots, places, shapes, directory_stride, slot, chain, ALIGN: tl.constexpr
):
    """A's address, ranks, inputs and slices at a program's projection and layer, and the target."""
    projection = tl.program_id(1)
    layer = tl.program_id(2)
    found = slots + slot * 16 + projection * 2
    has_group = chain < tl.load(found + 1)
    group = tl.load(found) + chain
    entry = directory + layer * directory_stride + group * 4
    address = tl.load(entry, mask=has_group, other=0).to(tl.int64)
    ranks = tl.load(entry + 2, mask=has_group, other=0)
    num_inputs = tl.multiple_of(tl.load(shapes + projection * 2), ALIGN)
    num_slices = tl.load(shapes + projection * 2 + 1)
    place = tl.multiple_of(tl.load(places + layer * tl.num_programs(1) + projection), ALIGN)
    return address, ranks, num_inputs, num_slices, place


@triton.jit(do_not_specialize=["slot", "chain", "block"])
def _copy_block(  # noqa: PLR0913
    pool, directory, slots, places, shapes, directory_stride, slot, chain, block,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One program copies a row of one projection of one layer, or clears it."""
    rank = tl.program_id(0)
    address, ranks, num_inputs, num_slices, place = _find_copy(
        directory, slots, places, shapes, directory_stride, slot, chain, ALIGN
    )
    num_copied = tl.where(rank < ranks, num_inputs, 0)
    row = (block * num_slices * 16 + rank).to(tl.int64)
    source = pool + address * 64 + rank * num_inputs
    target = pool + place + row * num_inputs
    for first in range(0, num_inputs, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(source + column, mask=column < num_copied, other=0.0)
        tl.store(target + column, values, mask=column < num_inputs)


@triton.jit(do_not_specialize=["slot", "chain", "block"])
def _copy_short_block(  # noqa: PLR0913
    pool, directory, slots, places, shapes, directory_stride, slot, chain, block,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One program lengthens eight rows of one projection of one layer, or clears them."""
    octet = tl.program_id(0)
    address, ranks, num_inputs, num_slices, place = _find_copy(
        directory, slots, places, shapes, directory_stride, slot, chain, ALIGN
    )
    num_copied = tl.where(octet * 8 < ranks, num_inputs, 0)
    row = block * num_slices * 16 + octet * 8 + tl.arange(0, 8)[:, None]
    words = pool.to(tl.pointer_type(tl.int32), bitcast=True) + address * 32
    words += octet * (3 * num_inputs)
    target = pool + place + row.to(tl.int64) * num_inputs
    WARPS: tl.constexpr = 4
    word = axis(WARPS, 0, 4, LANES_FIRST) * (BLOCK // WARPS) + axis(128, 3, 4, LANES_FIRST)
    word += axis(BLOCK // (128 * WARPS), 2, 4, LANES_FIRST) * 128
    for first in range(0, num_inputs, BLOCK):
        planes = load_planes(words + first + word, num_inputs, first + word < num_copied, "")
        rows = unpack_fp12(planes, WARPS, 1, BLOCK // (128 * WARPS), COMPILED)
        rows = tl.reshape(tl.permute(rows, (1, 0, 2)), (8, BLOCK)).to(tl.float32) * FP12_SCALE
        column = first + tl.arange(0, BLOCK)[None, :]
        tl.store(target + column, rows.to(pool.dtype.element_ty), mask=column < num_inputs)
