"""The kernels of augmented_gpu for steps of few rows: each program takes a row, and reads B first.

They are launched as those for tiles are: `work`, which has the number of tiles, is among what they
are given.
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
from loramux.kernels.gpu.lora.work_item import load_word
from loramux.kernels.gpu.lora_augmented.rank_block import (
    add_followers,
    add_product,
    find_head,
    load_b,
    load_followers,
    load_group,
    load_h,
    load_head,
    store_halves,
)
from loramux.kernels.gpu.pdl import pdl_wait_and_launch


@triton.jit
def _store_row(  # noqa: PLR0913
    x, total, residual_at, out_at, weight, after_ptr, column, inside, eps, after_eps,
    SIZE: tl.constexpr,
):  # fmt: skip
    """What add_norm does with one row: x is added, and the sum normed. x, total float32"""
    if after_ptr is not None:
        after = tl.load(after_ptr + column, mask=column < SIZE, other=0.0)
        x = scaled(x, after, after_eps, SIZE)
    # The sum is normed as it is stored, rounded.
    stored = (total + x).to(residual_at.dtype.element_ty)
    tl.store(residual_at, stored, mask=inside)
    normed = scaled(stored.to(tl.float32), weight, eps, SIZE)
    tl.store(out_at, normed.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_kernel(  # noqa: PLR0913
    y_ptr,
    residual_ptr,
    weight_ptr,
    after_ptr,
    out_ptr,
    pool,
    records,
    work,
    record_start,
    y_stride,
    eps,
    after_eps,
    row_map_start,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    records += record_start
    unit = load_word(work + row_map_start + row)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    record = records + unit * 64
    group = load_group(record)
    followers = load_followers(record)
    b = load_b(pool, group, 0, SIZE, SIZE, BLOCK)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    at = row * SIZE + column
    total = load_residual(residual_ptr + at, inside)
    pdl_wait_and_launch(PDL)
    y = y_ptr + row * y_stride
    part_step = tl.num_programs(0).to(tl.int64) * y_stride
    x = load_sum(y + column, inside, part_step, residual_ptr.dtype.element_ty, PARTS)[None, :]
    h = load_h(y + SIZE + group[2] * 16, group, 1, b.dtype, part_step, PARTS)
    x = add_product(x.to(tl.float32), h, b)
    x = add_followers(
        x, followers, pool, records, y + SIZE, 16, 1, 0, SIZE, SIZE, BLOCK, part_step, PARTS
    )
    x = tl.reshape(x, (BLOCK,))
    _store_row(
        x, total, residual_ptr + at, out_ptr + at, weight, after_ptr, column, inside,
        eps, after_eps, SIZE,
    )  # fmt: skip


@triton.jit
def activate_mul_kernel(  # noqa: PLR0913
    y_ptr,
    out_ptr,
    pool,
    records,
    work,
    record_start,
    y_stride,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    count = INNER - first
    column = tl.arange(0, BLOCK)[None, :]
    records += record_start
    record = records + tl.program_id(1) * 64
    of_gate, num_rows, row = load_head(record)
    of_up = load_group(record + 8)
    gate_followers = load_followers(record)
    up_followers = load_followers(record + 8)
    inside = column < tl.where(num_rows > 0, count, 0)
    b_gate = load_b(pool, of_gate, first, count, INNER, BLOCK)
    b_up = load_b(pool, of_up, first, count, INNER, BLOCK)
    pdl_wait_and_launch(PDL)
    y = y_ptr + row * y_stride
    tail = y + 2 * INNER
    gate = tl.load(y + first + column, mask=inside, other=0.0)
    up = tl.load(y + INNER + first + column, mask=inside, other=0.0)
    h_gate = load_h(tail + of_gate[2] * 32, of_gate, num_rows, b_gate.dtype)
    h_up = load_h(tail + 16 + of_up[2] * 32, of_up, num_rows, b_up.dtype)
    gate = add_product(gate.to(tl.float32), h_gate, b_gate)
    up = add_product(up.to(tl.float32), h_up, b_up)
    gate = add_followers(
        gate, gate_followers, pool, records, tail, 32, num_rows, first, count, INNER, BLOCK
    )
    up = add_followers(
        up, up_followers, pool, records + 8, tail + 16, 32, num_rows, first, count, INNER, BLOCK
    )
    mixed = activate(gate, ACTIVATION) * up
    out = out_ptr + row * INNER + first + column
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_write_kernel(  # noqa: PLR0913
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
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one head: its first and its second half, which are rotated by each other."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    OUTPUTS: tl.constexpr = (NUM_QUERIES + 2 * KV_HEADS) * HEAD_DIM
    head = tl.program_id(0)
    slice_index, first, width = find_head(head, NUM_QUERIES, KV_HEADS, HEAD_DIM)
    records += record_start + slice_index * 8
    record = records + tl.program_id(1) * 64
    group, num_rows, row_start = load_head(record)
    followers = load_followers(record)
    row = row_start + tl.arange(0, 1)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    inside = dim < tl.where(num_rows > 0, MIDDLE, 0)
    slot = tl.load(slots_ptr + row, mask=row < row_start + num_rows, other=-1)
    b_low = load_b(pool, group, first, MIDDLE, width, HALF)
    b_high = load_b(pool, group, first + MIDDLE, MIDDLE, width, HALF)
    pdl_wait_and_launch(PDL)
    y = y_ptr + row_start * y_stride
    tail = y + OUTPUTS + slice_index * 16
    at = y + head * HEAD_DIM + dim
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + MIDDLE, mask=inside, other=0.0)
    h = load_h(tail + group[2] * 48, group, num_rows, b_low.dtype)
    is_turned = dim < tl.where((slice_index < 2) & (num_rows > 0), MIDDLE, 0)
    angles = load_angles(cos_ptr, sin_ptr, row * HEAD_DIM + dim, is_turned, MIDDLE)
    low = add_product(low.to(tl.float32), h, b_low)
    high = add_product(high.to(tl.float32), h, b_high)
    low = add_followers(
        low, followers, pool, records, tail, 48, num_rows, first, MIDDLE, width, HALF
    )
    high = add_followers(
        high, followers, pool, records, tail, 48, num_rows, first + MIDDLE, MIDDLE, width, HALF
    )
    if slice_index < 2:
        low, high = rotate_halves(
            low, high, angles, norm_ptr, eps, head, dim < MIDDLE, HEAD_DIM, HALF
        )
    low = low.to(y_ptr.dtype.element_ty)
    high = high.to(y_ptr.dtype.element_ty)
    # Only this program has read what it overwrites.
    tl.debug_barrier()
    store_halves(
        low, high, at, inside, slice_index, storage_ptr, slot, page_stride, layer_start,
        first + dim, KV_HEADS, HEAD_DIM, BLOCK_TOKENS,
    )  # fmt: skip
