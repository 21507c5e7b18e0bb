"""Elementwise kernels that add h @ B first, for steps of few rows: one row per CTA, B loaded first.

h = x @ A.T stands behind the outputs in each row of y. `work` is an argument of all kernels, so
that they are launched like those for tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import (
    activate,
    load_angles,
    load_residual,
    load_sum,
    rotate_halves,
    scaled,
)
from loramux.kernels.gpu.lora.work_item import (
    ITEM_WORDS,
    RESOLVED_WORDS,
    load_block,
    load_first_item,
    load_next_range,
    load_word,
)
from loramux.kernels.gpu.pdl import pdl_wait_and_launch


@triton.jit
def load_b(pool, block, start, count, width, N: tl.constexpr):
    """Columns start.. of a rank block's B [ranks, width] as [16, N]; `count` columns exist."""
    rank = tl.arange(0, 16)[:, None]
    column = tl.arange(0, N)[None, :]
    mask = (rank < block[1]) & (column < count)
    return tl.load(pool + block[0] + rank * width + start + column, mask=mask, other=0.0)


@triton.jit
def load_h(h_ptr, block, rows, dtype, split_stride=0, SPLITS: tl.constexpr = 1):
    """weight * h of a rank block and a row: [16] float32. rows: 1, or 0 to load nothing

    h_ptr points to the block's h of the row; split_stride is the distance of two split-K partial
    sums.
    """
    rank = tl.arange(0, 16)
    # Rows without an adapter have no rank block: what is stored there may be NaN.
    live_ranks = tl.where(block[1] > 0, rows * 16, 0)
    h = load_sum(h_ptr + rank, rank < live_ranks, split_stride, dtype, SPLITS)
    return h.to(tl.float32) * block[3]


@triton.jit
def add_row(total, h, b):
    """total + h @ b of a row: [1, N] float32"""
    return total + tl.sum(b.to(tl.float32) * h[:, None], axis=0)[None, :]


@triton.jit
def add_next(  # noqa: PLR0913
    total, next_range, pool, items, h_ptr, h_step, rows, start, count, width,
    N: tl.constexpr, split_stride=0, SPLITS: tl.constexpr = 1,
):  # fmt: skip
    """total [1, N] float32 plus what the next rank blocks of the row add.

    items, h_ptr point to the slice; h_step is the distance of two rank blocks of h.
    """
    for index in tl.range(next_range[0], next_range[1], num_stages=1):
        block = load_block(items + index * RESOLVED_WORDS)
        b = load_b(pool, block, start, count, width, N)
        h = load_h(h_ptr + block[2] * h_step, block, rows, b.dtype, split_stride, SPLITS)
        total = add_row(total, h, b)
    return total


@triton.jit
def locate_head(head, NUM_QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Slice (q, k, v) of an attention head, its first output there, and the slice's outputs."""
    is_query = head < NUM_QUERIES
    is_value = head >= NUM_QUERIES + KV_HEADS
    slice_start = tl.where(is_query, 0, tl.where(is_value, NUM_QUERIES + KV_HEADS, NUM_QUERIES))
    width = tl.where(is_query, NUM_QUERIES, KV_HEADS) * HEAD_DIM
    slice_index = tl.where(is_query, 0, tl.where(is_value, 2, 1))
    return slice_index, (head - slice_start) * HEAD_DIM, width


@triton.jit
def store_halves(  # noqa: PLR0913
    low, high, at, inside, slice_index, storage_ptr, slot, page_stride, layer_start, column,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the halves of a head: queries at `at`, keys and values in KV pages.

    column: of the first half, in the slice
    """
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    if slice_index == 0:
        tl.store(at, low, mask=inside)
        tl.store(at + MIDDLE, high, mask=inside)
    else:
        page = (slot // BLOCK_TOKENS).to(tl.int64) * page_stride + layer_start
        # Values follow the keys of the whole page.
        token = slot % BLOCK_TOKENS + tl.where(slice_index == 2, BLOCK_TOKENS, 0)
        target = storage_ptr + page + token * (KV_HEADS * HEAD_DIM) + column
        tl.store(target, low, mask=inside & (slot >= 0))
        tl.store(target + MIDDLE, high, mask=inside & (slot >= 0))


@triton.jit
def _store_normed(  # noqa: PLR0913
    x, total, residual_at, out_at, weight, after_ptr, column, inside, eps, after_eps,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Add x to the residual of one row and store it and its norm; x, total float32."""
    if after_ptr is not None:
        after = tl.load(after_ptr + column, mask=column < SIZE, other=0.0)
        x = scaled(x, after, after_eps, SIZE)
    # The norm is of the rounded sum, as it is stored.
    stored = (total + x).to(residual_at.dtype.element_ty)
    tl.store(residual_at, stored, mask=inside)
    normed = scaled(stored.to(tl.float32), weight, eps, SIZE)
    tl.store(out_at, normed.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_kernel(  # noqa: PLR0913
    y_ptr, residual_ptr, weight_ptr, after_ptr, out_ptr, pool, items, work, item_start, y_stride,
    eps, after_eps, row_map_start, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """residual += y + h @ B, and the norm of it, one row per CTA."""
    row = tl.program_id(0).to(tl.int64)
    items += item_start
    item = items + load_word(work + row_map_start + row) * RESOLVED_WORDS
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    block = load_block(item)
    next_range = load_next_range(item)
    b = load_b(pool, block, 0, SIZE, SIZE, BLOCK)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    at = row * SIZE + column
    total = load_residual(residual_ptr + at, inside)
    pdl_wait_and_launch(PDL)
    y = y_ptr + row * y_stride
    split_stride = tl.num_programs(0).to(tl.int64) * y_stride
    x = load_sum(y + column, inside, split_stride, residual_ptr.dtype.element_ty, SPLITS)[None, :]
    h = load_h(y + SIZE + block[2] * 16, block, 1, b.dtype, split_stride, SPLITS)
    x = add_row(x.to(tl.float32), h, b)
    x = add_next(
        x, next_range, pool, items, y + SIZE, 16, 1, 0, SIZE, SIZE, BLOCK, split_stride, SPLITS
    )
    x = tl.reshape(x, (BLOCK,))
    _store_normed(
        x, total, residual_ptr + at, out_ptr + at, weight, after_ptr, column, inside,
        eps, after_eps, SIZE,
    )  # fmt: skip


@triton.jit
def activate_mul_kernel(  # noqa: PLR0913
    y_ptr, out_ptr, pool, items, work, item_start, y_stride, INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """activation(gate + h @ B) * (up + h @ B), one row and BLOCK outputs per CTA."""
    start = tl.program_id(0) * BLOCK
    count = INNER - start
    column = tl.arange(0, BLOCK)[None, :]
    items += item_start
    item = items + tl.program_id(1) * RESOLVED_WORDS
    of_gate, rows, row = load_first_item(item)
    of_up = load_block(item + ITEM_WORDS)
    next_gate = load_next_range(item)
    next_up = load_next_range(item + ITEM_WORDS)
    inside = column < tl.where(rows > 0, count, 0)
    b_gate = load_b(pool, of_gate, start, count, INNER, BLOCK)
    b_up = load_b(pool, of_up, start, count, INNER, BLOCK)
    pdl_wait_and_launch(PDL)
    y = y_ptr + row * y_stride
    h_ptr = y + 2 * INNER
    gate = tl.load(y + start + column, mask=inside, other=0.0)
    up = tl.load(y + INNER + start + column, mask=inside, other=0.0)
    h_gate = load_h(h_ptr + of_gate[2] * 32, of_gate, rows, b_gate.dtype)
    h_up = load_h(h_ptr + 16 + of_up[2] * 32, of_up, rows, b_up.dtype)
    gate = add_row(gate.to(tl.float32), h_gate, b_gate)
    up = add_row(up.to(tl.float32), h_up, b_up)
    gate = add_next(gate, next_gate, pool, items, h_ptr, 32, rows, start, count, INNER, BLOCK)
    up = add_next(
        up, next_up, pool, items + ITEM_WORDS, h_ptr + 16, 32, rows, start, count, INNER, BLOCK
    )
    mixed = activate(gate, ACTIVATION) * up
    out = out_ptr + row * INNER + start + column
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expand_halves(  # noqa: PLR0913
    at, h_ptr, b_low, b_high, block, next_range, pool, items, rows, inside, angle_at, cos_ptr,
    sin_ptr, is_rotated, start, width, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Both halves of a head plus h @ B, float32, and the rotation's angles."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + MIDDLE, mask=inside, other=0.0)
    h = load_h(h_ptr + block[2] * 48, block, rows, b_low.dtype)
    angles = load_angles(cos_ptr, sin_ptr, angle_at, is_rotated, MIDDLE)
    low = add_row(low.to(tl.float32), h, b_low)
    high = add_row(high.to(tl.float32), h, b_high)
    low = add_next(low, next_range, pool, items, h_ptr, 48, rows, start, MIDDLE, width, HALF)
    high = add_next(
        high, next_range, pool, items, h_ptr, 48, rows, start + MIDDLE, MIDDLE, width, HALF
    )
    return low, high, angles


@triton.jit
def rotate_write_kernel(  # noqa: PLR0913
    y_ptr, cos_ptr, sin_ptr, storage_ptr, slots_ptr, norm_ptr, pool, items, work, item_start,
    y_stride, page_stride, layer_start, eps, NUM_QUERIES: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotates and writes qkv + h @ B, one row and one head (both halves) per CTA."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    OUTPUTS: tl.constexpr = (NUM_QUERIES + 2 * KV_HEADS) * HEAD_DIM
    head = tl.program_id(0)
    slice_index, start, width = locate_head(head, NUM_QUERIES, KV_HEADS, HEAD_DIM)
    items += item_start + slice_index * ITEM_WORDS
    item = items + tl.program_id(1) * RESOLVED_WORDS
    block, rows, row_start = load_first_item(item)
    next_range = load_next_range(item)
    row = row_start + tl.arange(0, 1)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    inside = dim < tl.where(rows > 0, MIDDLE, 0)
    slot = tl.load(slots_ptr + row, mask=row < row_start + rows, other=-1)
    b_low = load_b(pool, block, start, MIDDLE, width, HALF)
    b_high = load_b(pool, block, start + MIDDLE, MIDDLE, width, HALF)
    pdl_wait_and_launch(PDL)
    y = y_ptr + row_start * y_stride
    at = y + head * HEAD_DIM + dim
    is_rotated = dim < tl.where((slice_index < 2) & (rows > 0), MIDDLE, 0)
    low, high, angles = _expand_halves(
        at, y + OUTPUTS + slice_index * 16, b_low, b_high, block, next_range, pool, items, rows,
        inside, row * HEAD_DIM + dim, cos_ptr, sin_ptr, is_rotated, start, width, HEAD_DIM, HALF,
    )  # fmt: skip
    if slice_index < 2:
        low, high = rotate_halves(
            low, high, angles, norm_ptr, eps, head, dim < MIDDLE, HEAD_DIM, HALF
        )
    low = low.to(y_ptr.dtype.element_ty)
    high = high.to(y_ptr.dtype.element_ty)
    # Only this CTA reads what it overwrites.
    tl.debug_barrier()
    store_halves(
        low, high, at, inside, slice_index, storage_ptr, slot, page_stride, layer_start,
        start + dim, KV_HEADS, HEAD_DIM, BLOCK_TOKENS,
    )  # fmt: skip
