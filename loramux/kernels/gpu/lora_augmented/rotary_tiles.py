"""rotate_write for tiles of rows that share their adapters (tensor cores)."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import load_angles
from loramux.kernels.gpu.lora.mma_layout import (
    add_ordered,
    add_ordered_followers,
    load_ordered_b,
    load_ordered_h,
    order_columns,
    order_rows,
    sum_columns,
)
from loramux.kernels.gpu.lora.work_item import load_word
from loramux.kernels.gpu.lora_augmented.rank_block import (
    find_head,
    load_followers,
    load_head,
    store_halves,
)
from loramux.kernels.gpu.pdl import pdl_wait_and_launch


@triton.jit
def norm_halves(low, high, at, eps, inside, HEAD_DIM: tl.constexpr):
    """Heads' halves, normed. at: of the weight, where the first half has its columns"""
    inverse = tl.rsqrt(sum_columns(low * low + high * high) / HEAD_DIM + eps)
    low *= inverse * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high *= inverse * tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _rotate_rows(  # noqa: PLR0913
    b_low, b_high, of_b, followers, start, y_ptr, cos_ptr, sin_ptr, storage_ptr, slots_ptr,
    norm_ptr, pool, records, y_stride, page_stride, layer_start, eps, head, slice_index, first,
    width, NUM_QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """16 rows of a tile, from `start` on."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    OUTPUTS: tl.constexpr = (NUM_QUERIES + 2 * KV_HEADS) * HEAD_DIM
    group, num_rows, row_start = of_b
    num_rows -= start
    row_start += start
    row = order_rows()
    dim = order_columns(WARPS, J)
    rows = row_start + row
    inside = (row < num_rows) & (dim < MIDDLE)
    tail = y_ptr + row_start * y_stride + OUTPUTS + slice_index * 16
    at = y_ptr + rows * y_stride + head * HEAD_DIM + dim
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + MIDDLE, mask=inside, other=0.0)
    h = load_ordered_h(tail, 48, y_stride, group, num_rows, b_low.dtype, WARPS)
    slot = tl.load(slots_ptr + rows, mask=row < num_rows, other=-1)
    is_turned = (row < tl.where(slice_index == 2, 0, num_rows)) & (dim < MIDDLE)
    cos, sin = load_angles(cos_ptr, sin_ptr, rows * HEAD_DIM + dim, is_turned, MIDDLE)
    low = add_ordered(low.to(tl.float32), h, b_low, WARPS, J)
    high = add_ordered(high.to(tl.float32), h, b_high, WARPS, J)
    low = add_ordered_followers(
        low, followers, pool, records, tail, y_stride, 48, num_rows, first, MIDDLE, width,
        WARPS, J,
    )  # fmt: skip
    high = add_ordered_followers(
        high, followers, pool, records, tail, y_stride, 48, num_rows, first + MIDDLE, MIDDLE,
        width, WARPS, J,
    )  # fmt: skip
    if slice_index < 2:
        if norm_ptr is not None:
            weight = norm_ptr + head * HEAD_DIM + dim
            low, high = norm_halves(low, high, weight, eps, dim < MIDDLE, HEAD_DIM)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    low = low.to(y_ptr.dtype.element_ty)
    high = high.to(y_ptr.dtype.element_ty)
    store_halves(
        low, high, at, inside, slice_index, storage_ptr, slot, page_stride, layer_start,
        first + dim, KV_HEADS, HEAD_DIM, BLOCK_TOKENS,
    )  # fmt: skip


@triton.jit
def rotate_tiles_kernel(  # noqa: PLR0913
    y_ptr,
    cos_ptr,
    sin_ptr,
    storage_ptr,
    slots_ptr,
    norm_ptr,
    pool,
    records,
    work,
    record_start,
    y_stride,
    page_stride,
    layer_start,
    eps,
    NUM_QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    J: tl.constexpr,
    LOOPS: tl.constexpr,
    EARLY_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one head: its first and its second half, which are rotated by each other."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    head = tl.program_id(0)
    slice_index, first, width = find_head(head, NUM_QUERIES, KV_HEADS, HEAD_DIM)
    records += record_start + slice_index * 8
    num_tiles = load_word(work + 2)
    of_b = load_head(records + begin * 64)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        followers = load_followers(records + tile * 64)
        if EARLY_B:
            b_low = load_ordered_b(pool, of_b[0], first, MIDDLE, width, WARPS, J)
            b_high = load_ordered_b(pool, of_b[0], first + MIDDLE, MIDDLE, width, WARPS, J)
        if tile == begin:
            pdl_wait_and_launch(PDL)
        if not EARLY_B:
            b_low = load_ordered_b(pool, of_b[0], first, MIDDLE, width, WARPS, J)
            b_high = load_ordered_b(pool, of_b[0], first + MIDDLE, MIDDLE, width, WARPS, J)
        num_turns = tl.cdiv(of_b[1], 16) if LOOPS else 1
        for turn in tl.range(0, num_turns, num_stages=1):
            _rotate_rows(
                b_low, b_high, of_b, followers, turn * 16, y_ptr, cos_ptr, sin_ptr, storage_ptr,
                slots_ptr, norm_ptr, pool, records, y_stride, page_stride, layer_start, eps, head,
                slice_index, first, width, NUM_QUERIES, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, WARPS,
                J,
            )  # fmt: skip
        of_b = load_head(records + (tile + step) * 64)
