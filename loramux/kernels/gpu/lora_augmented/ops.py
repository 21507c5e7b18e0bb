"""LoRA on augmented weights: A is appended to W, so that the base GEMM computes the shrink as well.

y is [rows, outputs + appended rows]; the elementwise kernels behind the GEMM add h @ B. The sum
stays in float32 until a kernel stores its result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.gemm.small_m import MAX_ROWS
from loramux.kernels.gpu.lora.fp12 import FP12_SCALE, load_planes, unpack_fp12
from loramux.kernels.gpu.lora.work_item import ALIGN, ENTRY_WORDS, PROJECTIONS, RANGE_WORDS
from loramux.kernels.gpu.lora.work_list import RANK_BLOCK
from loramux.kernels.gpu.lora_augmented.rows import (
    activate_mul_kernel,
    add_norm_kernel,
    rotate_write_kernel,
)
from loramux.kernels.gpu.lora_augmented.tables import AugmentedSite, AugmentedWeights
from loramux.kernels.gpu.lora_augmented.tiles import (
    activate_tiles_kernel,
    expand_kernel,
    rotate_tiles_kernel,
)
from loramux.kernels.gpu.pdl import axis, pdl_options
from loramux.kernels.ops import KVTarget, Norm, Rotation

_COPY_BLOCK = 1024
_MIN_DOT = 16
# Outputs of a CTA that has a tile.
_TILE_COLUMNS = 128
# Register limit of activate_tiles_kernel: with more registers, fewer CTAs are resident.
_ACTIVATE_REGISTERS = 128
# Bytes of the dtypes that tensor cores multiply; float32 takes FMAs and more registers.
_MMA_BYTES = 2


def copy_block(  # noqa: PLR0913
    weights: AugmentedWeights,
    pool: Tensor,
    directory: Tensor,
    slots: Tensor,
    *,
    rank_block: tuple[int, int],
    block: int,
) -> None:
    """Copy A of one rank block (slot, index) to block `block` of every augmented weight.

    Projections that the adapter does not change are cleared.   pool [pages, elements]
    directory int32 [layers, blocks, 4]   slots int32 [slots, 8 projections, 2]
    """
    num_layers, num_projections = weights.offsets.shape
    arguments = (
        *(pool, directory, slots, weights.offsets, weights.shapes, directory.stride(0)),
        *(*rank_block, block),
    )
    options = {"BLOCK": _COPY_BLOCK, "ALIGNMENT": weights.alignment, "num_warps": 4}
    if weights.is_fp12:
        grid = (RANK_BLOCK // 8, num_projections, num_layers)
        _unpack_block[grid](*arguments, COMPILED=pool.is_cuda, **options)
    else:
        _copy_block[RANK_BLOCK, num_projections, num_layers](*arguments, **options)


def add_norm(
    y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, lora: AugmentedSite
) -> Tensor:
    """add_norm of y with its adapters. y [rows, outputs + appended rows]

    y may be split-K partial sums, contiguous float32 [splits, rows, outputs + appended rows]
    """
    num_rows, size = residual.shape
    out = torch.empty_like(residual)
    tables = lora.tables
    add_norm_kernel[(num_rows,)](
        *(y, residual, norm.weight, None if after is None else after.weight, out),
        *(lora.pool, tables.items, tables.work, lora.item_start, y.stride(-2)),
        *(norm.eps, norm.eps if after is None else after.eps, tables.limits.row_map_start),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SPLITS=1 if y.ndim == 2 else len(y),
        num_warps=lora.launch.norm_warps,
        **pdl_options(y.device.type),
    )
    return out


def expand(y: Tensor, lora: AugmentedSite) -> Tensor:
    """y with its adapters [rows, outputs], for a site of one projection.

    y [rows, outputs + appended rows] is updated in place; split-K partial sums, contiguous float32
    [splits, rows, outputs + appended rows], are not changed.
    """
    num_rows, size = y.shape[-2], lora.num_outputs
    tables = lora.tables
    out = y[:, :size] if y.ndim == 2 else lora.pool.new_empty(num_rows, size)
    options = _tile_options(lora, y, min(_TILE_COLUMNS, triton.next_power_of_2(size)))
    num_columns = 8 * options["WARPS"] * options["J"]
    expand_kernel[(triton.cdiv(size, num_columns), lora.max_tiles(num_rows))](
        *(y, out, lora.pool, tables.items, tables.work, lora.item_start, num_rows),
        *(y.stride(-2), out.stride(0)),
        SIZE=size,
        SPLITS=1 if y.ndim == 2 else len(y),
        **options,
        **pdl_options(y.device.type),
    )
    return out


def rotate_write(y: Tensor, rotation: Rotation, target: KVTarget, lora: AugmentedSite) -> Tensor:
    """rotate_write of y with its adapters. y [rows, outputs + appended rows]"""
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
        *(None if norm is None else norm.weight, lora.pool, tables.items, tables.work),
        *(lora.item_start, y.stride(0), target.storage.stride(0)),
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
    """activate_mul of y with its adapters. y [rows, outputs + appended rows]"""
    num_rows, inner = y.shape[0], lora.num_outputs // 2
    out = y.new_empty(num_rows, inner)
    tables = lora.tables
    block = min(lora.launch.activate_n, triton.next_power_of_2(inner))
    kernel, options = activate_mul_kernel, {"BLOCK": block, "num_warps": lora.launch.activate_warps}
    if lora.launch.tile_rows > 1:
        options = _tile_options(lora, y, min(_TILE_COLUMNS, triton.next_power_of_2(inner)))
        kernel, block = activate_tiles_kernel, 8 * options["WARPS"] * options["J"]
        if y.itemsize == _MMA_BYTES:
            options["maxnreg"] = _ACTIVATE_REGISTERS
    kernel[(triton.cdiv(inner, block), lora.max_tiles(num_rows))](
        *(y, out, lora.pool, tables.items, tables.work, lora.item_start, y.stride(0)),
        INNER=inner,
        ACTIVATION=activation,
        **options,
        **pdl_options(y.device.type),
    )
    return out


def _tile_options(lora: AugmentedSite, y: Tensor, num_columns: int) -> dict[str, int]:
    """Launch options of a kernel for tiles with at least num_columns outputs per CTA (2^n)."""
    num_columns = max(_MIN_DOT, num_columns)
    # A thread loads 16 bytes at once.
    per_thread = min(num_columns // 8, 16 // y.itemsize)
    num_warps = num_columns // (8 * per_thread)
    return {
        "WARPS": num_warps,
        "J": per_thread,
        "LOOPS": lora.launch.tile_rows > 16,
        "EARLY_B": _reads_b_early(y.shape[-2]),
        "num_warps": num_warps,
    }


def _reads_b_early(num_rows: int) -> bool:
    """Whether the GEMM ahead launches its dependents early, so that B is loaded before y.

    Behind other GEMMs B is loaded together with y: MMA operands are awaited before any load that
    was issued later.
    """
    return num_rows <= MAX_ROWS


@triton.jit
def _locate_copy(
    directory, slots, offsets, shapes, directory_stride, slot, index, ALIGNMENT: tl.constexpr
):
    """A's address, ranks, inputs and slices at a CTA's projection and layer, and the target."""
    projection = tl.program_id(1)
    layer = tl.program_id(2)
    blocks = slots + (slot * PROJECTIONS + projection) * RANGE_WORDS
    has_block = index < tl.load(blocks + 1)
    entry = directory + layer * directory_stride + (tl.load(blocks) + index) * ENTRY_WORDS
    address = tl.load(entry, mask=has_block, other=0).to(tl.int64)
    ranks = tl.load(entry + 2, mask=has_block, other=0)
    num_inputs = tl.multiple_of(tl.load(shapes + projection * 2), ALIGNMENT)
    num_slices = tl.load(shapes + projection * 2 + 1)
    offset = tl.load(offsets + layer * tl.num_programs(1) + projection)
    return address, ranks, num_inputs, num_slices, tl.multiple_of(offset, ALIGNMENT)


# Not specialized: a kernel is compiled once, not again for every slot that is a multiple of 16.
@triton.jit(do_not_specialize=["slot", "index", "block"])
def _copy_block(  # noqa: PLR0913
    pool, directory, slots, offsets, shapes, directory_stride, slot, index, block,
    BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Copy or clear one row of one projection of one layer per CTA."""
    rank = tl.program_id(0)
    address, ranks, num_inputs, num_slices, offset = _locate_copy(
        directory, slots, offsets, shapes, directory_stride, slot, index, ALIGNMENT
    )
    num_copied = tl.where(rank < ranks, num_inputs, 0)
    row = (block * num_slices * 16 + rank).to(tl.int64)
    source = pool + address * ALIGN + rank * num_inputs
    target = pool + offset + row * num_inputs
    for first in range(0, num_inputs, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(source + column, mask=column < num_copied, other=0.0)
        tl.store(target + column, values, mask=column < num_inputs)


@triton.jit(do_not_specialize=["slot", "index", "block"])
def _unpack_block(  # noqa: PLR0913
    pool, directory, slots, offsets, shapes, directory_stride, slot, index, block,
    BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Unpacks or clears eight rows of one projection of one layer per CTA."""
    octet = tl.program_id(0)
    address, ranks, num_inputs, num_slices, offset = _locate_copy(
        directory, slots, offsets, shapes, directory_stride, slot, index, ALIGNMENT
    )
    num_copied = tl.where(octet * 8 < ranks, num_inputs, 0)
    row = block * num_slices * 16 + octet * 8 + tl.arange(0, 8)[:, None]
    words = pool.to(tl.pointer_type(tl.int32), bitcast=True) + address * (ALIGN // 2)
    words += octet * (3 * num_inputs)
    target = pool + offset + row.to(tl.int64) * num_inputs
    WARPS: tl.constexpr = 4
    word = axis(WARPS, 0, 4) * (BLOCK // WARPS) + axis(128, 3, 4)
    word += axis(BLOCK // (128 * WARPS), 2, 4) * 128
    for first in range(0, num_inputs, BLOCK):
        planes = load_planes(words + first + word, num_inputs, first + word < num_copied, "")
        rows = unpack_fp12(planes, WARPS, 1, BLOCK // (128 * WARPS), COMPILED)
        rows = tl.reshape(tl.permute(rows, (1, 0, 2)), (8, BLOCK)).to(tl.float32) * FP12_SCALE
        column = first + tl.arange(0, BLOCK)[None, :]
        tl.store(target + column, rows.to(pool.dtype.element_ty), mask=column < num_inputs)
