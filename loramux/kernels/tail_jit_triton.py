"""The kernels of tail_triton: each takes a row, or a tile of rows that share their adapters.

Tiles are the second axis of a grid: programs that find none come last. A tile's record is read
beside the number of tiles, not behind it: a program that has none has read what nobody uses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.fused_triton import activate, load_angles, load_sum, rotate_halves, scaled
from loramux.kernels.launch_triton import begin_after_previous
from loramux.kernels.lora_records_triton import load_word
from loramux.kernels.tail_group_triton import (
    add_followers,
    add_product,
    load_b,
    load_followers,
    load_group,
    load_h,
    load_head,
    load_parts,
)


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
    OVERLAP: tl.constexpr,
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
    begin_after_previous(OVERLAP)
    y = y_ptr + row * y_stride
    part_step = tl.num_programs(0).to(tl.int64) * y_stride
    at = row * SIZE + column
    total = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = load_sum(y + column, inside, part_step, residual_ptr.dtype.element_ty, PARTS)[None, :]
    h = load_h(y + SIZE, 16, 0, group, 1, b.dtype, 1, part_step, PARTS)
    x = add_product(x.to(tl.float32), h, b, 1)
    x = add_followers(
        x, followers, pool, records, y + SIZE, 0, 16, 1, 0, SIZE, SIZE, 1, BLOCK,
        part_step, PARTS,
    )  # fmt: skip
    x = tl.reshape(x, (BLOCK,))
    _store_row(
        x, total, residual_ptr + at, out_ptr + at, weight, after_ptr, column, inside,
        eps, after_eps, SIZE,
    )  # fmt: skip


@triton.jit
def _expand_tile(  # noqa: PLR0913
    head, is_first, y_ptr, out_ptr, pool, records, part_step, y_stride, out_stride, first,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    EARLY_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    group, followers, num_rows, row_start = head
    if PARTS == 1:
        is_changed = (group[1] > 0) | (followers[0] < followers[1])
        num_rows = tl.where(is_changed, num_rows, 0)
    count = SIZE - first
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    y = y_ptr + row_start * y_stride
    inside = (row < num_rows) & (column < count)
    at = y + row * y_stride + first + column
    if EARLY_B:
        b = load_b(pool, group, first, count, SIZE, BLOCK)
    if is_first:
        begin_after_previous(OVERLAP)
    values = load_parts(at, inside, part_step, pool.dtype.element_ty, PARTS)
    if not EARLY_B:
        b = load_b(pool, group, first, count, SIZE, BLOCK)
    h = load_h(y + SIZE, 16, y_stride, group, num_rows, b.dtype, ROWS, part_step, PARTS)
    total = add_product(values.to(tl.float32), h, b, ROWS)
    total = add_followers(
        total, followers, pool, records, y + SIZE, y_stride, 16, num_rows, first, count, SIZE,
        ROWS, BLOCK, part_step, PARTS,
    )  # fmt: skip
    out = out_ptr + (row_start + row) * out_stride + first + column
    tl.store(out, total.to(values.dtype), mask=inside)


@triton.jit(do_not_specialize=["all_rows"])
def expand_kernel(  # noqa: PLR0913
    y_ptr,
    out_ptr,
    pool,
    records,
    work,
    record_start,
    all_rows,
    y_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY_B: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y with its adapters; a whole one in place: what they do not change is not touched."""
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    records += record_start
    first = tl.program_id(0) * BLOCK
    part_step = all_rows.to(tl.int64) * y_stride
    num_tiles = load_word(work + 2)
    head = load_head(records + begin * 64)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        _expand_tile(
            head, tile == begin, y_ptr, out_ptr, pool, records, part_step, y_stride, out_stride,
            first, SIZE, BLOCK, ROWS, PARTS, EARLY_B, OVERLAP,
        )  # fmt: skip
        head = load_head(records + (tile + step) * 64)


@triton.jit
def _activate_tile(  # noqa: PLR0913
    of_gate, of_up, is_first, y_ptr, out_ptr, pool, records, y_stride, first,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    _, _, num_rows, row_start = of_gate
    count = INNER - first
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < count)
    y = y_ptr + row_start * y_stride
    tail = y + 2 * INNER
    at = y + row * y_stride + first + column
    if EARLY_B:
        b_gate = load_b(pool, of_gate[0], first, count, INNER, BLOCK)
        b_up = load_b(pool, of_up[0], first, count, INNER, BLOCK)
    if is_first:
        begin_after_previous(OVERLAP)
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + INNER, mask=inside, other=0.0)
    if not EARLY_B:
        b_gate = load_b(pool, of_gate[0], first, count, INNER, BLOCK)
        b_up = load_b(pool, of_up[0], first, count, INNER, BLOCK)
    h_gate = load_h(tail, 32, y_stride, of_gate[0], num_rows, b_gate.dtype, ROWS)
    h_up = load_h(tail + 16, 32, y_stride, of_up[0], num_rows, b_up.dtype, ROWS)
    gate = add_product(gate.to(tl.float32), h_gate, b_gate, ROWS)
    up = add_product(up.to(tl.float32), h_up, b_up, ROWS)
    gate = add_followers(
        gate, of_gate[1], pool, records, tail, y_stride, 32, num_rows, first, count, INNER,
        ROWS, BLOCK,
    )  # fmt: skip
    up = add_followers(
        up, of_up[1], pool, records + 8, tail + 16, y_stride, 32, num_rows, first, count,
        INNER, ROWS, BLOCK,
    )  # fmt: skip
    mixed = activate(gate, ACTIVATION) * up
    out = out_ptr + (row_start + row) * INNER + first + column
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=inside)


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
    ROWS: tl.constexpr,
    EARLY_B: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    records += record_start
    first = tl.program_id(0) * BLOCK
    num_tiles = step
    if ROWS > 1:
        num_tiles = load_word(work + 2)
    record = records + begin * 64
    of_gate = load_head(record)
    of_up = load_head(record + 8)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        _activate_tile(
            of_gate, of_up, tile == begin, y_ptr, out_ptr, pool, records, y_stride, first,
            INNER, ACTIVATION, BLOCK, ROWS, EARLY_B, OVERLAP,
        )  # fmt: skip
        record = records + (tile + step) * 64
        of_gate = load_head(record)
        of_up = load_head(record + 8)


@triton.jit
def _rotate_tile(  # noqa: PLR0913
    of_b, is_first, y_ptr, cos_ptr, sin_ptr, storage_ptr, slots_ptr, norm_ptr, pool, records,
    y_stride, page_stride, layer_start, eps, head, NUM_QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, EARLY_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """records: at the slice"""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    OUTPUTS: tl.constexpr = (NUM_QUERIES + 2 * KV_HEADS) * HEAD_DIM
    is_query = head < NUM_QUERIES
    is_value = head >= NUM_QUERIES + KV_HEADS
    slice_index = tl.where(is_query, 0, tl.where(is_value, 2, 1))
    width = tl.where(is_query, NUM_QUERIES, KV_HEADS) * HEAD_DIM
    # Of the slice, in heads.
    start = tl.where(is_query, 0, tl.where(is_value, NUM_QUERIES + KV_HEADS, NUM_QUERIES))
    first = (head - start) * HEAD_DIM
    group, followers, num_rows, row_start = of_b
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    rows = row_start + row
    inside = (row < num_rows) & (dim < MIDDLE)
    y = y_ptr + row_start * y_stride
    tail = y + OUTPUTS + slice_index * 16
    at = y + row * y_stride + head * HEAD_DIM + dim
    slot = tl.load(slots_ptr + rows, mask=row < num_rows, other=-1)
    if EARLY_B:
        b_low = load_b(pool, group, first, MIDDLE, width, HALF)
        b_high = load_b(pool, group, first + MIDDLE, MIDDLE, width, HALF)
    if is_first:
        begin_after_previous(OVERLAP)
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + MIDDLE, mask=inside, other=0.0)
    if not EARLY_B:
        b_low = load_b(pool, group, first, MIDDLE, width, HALF)
        b_high = load_b(pool, group, first + MIDDLE, MIDDLE, width, HALF)
    h = load_h(tail, 48, y_stride, group, num_rows, b_low.dtype, ROWS)
    is_turned = (row < tl.where(is_value, 0, num_rows)) & (dim < MIDDLE)
    angles = load_angles(cos_ptr, sin_ptr, rows * HEAD_DIM + dim, is_turned, MIDDLE)
    low = add_product(low.to(tl.float32), h, b_low, ROWS)
    high = add_product(high.to(tl.float32), h, b_high, ROWS)
    low = add_followers(
        low, followers, pool, records, tail, y_stride, 48, num_rows, first, MIDDLE, width,
        ROWS, HALF,
    )  # fmt: skip
    high = add_followers(
        high, followers, pool, records, tail, y_stride, 48, num_rows, first + MIDDLE, MIDDLE,
        width, ROWS, HALF,
    )  # fmt: skip
    if not is_value:
        low, high = rotate_halves(
            low, high, angles, norm_ptr, eps, head, dim < MIDDLE, HEAD_DIM, HALF
        )
    low = low.to(y_ptr.dtype.element_ty)
    high = high.to(y_ptr.dtype.element_ty)
    # Only this program has read what it overwrites.
    tl.debug_barrier()
    if is_query:
        tl.store(at, low, mask=inside)
        tl.store(at + MIDDLE, high, mask=inside)
    else:
        block = (slot // BLOCK_TOKENS).to(tl.int64) * page_stride + layer_start
        # Values follow the keys of the whole block.
        token = slot % BLOCK_TOKENS + tl.where(is_value, BLOCK_TOKENS, 0)
        where = storage_ptr + block + token * (KV_HEADS * HEAD_DIM) + first + dim
        tl.store(where, low, mask=inside & (slot >= 0))
        tl.store(where + MIDDLE, high, mask=inside & (slot >= 0))


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
    ROWS: tl.constexpr,
    EARLY_B: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has one head: its first and its second half, which are rotated by each other."""
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    head = tl.program_id(0)
    is_value = head >= NUM_QUERIES + KV_HEADS
    records += record_start + tl.where(head < NUM_QUERIES, 0, tl.where(is_value, 2, 1)) * 8
    num_tiles = step
    if ROWS > 1:
        num_tiles = load_word(work + 2)
    of_b = load_head(records + begin * 64)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        _rotate_tile(
            of_b, tile == begin, y_ptr, cos_ptr, sin_ptr, storage_ptr, slots_ptr, norm_ptr, pool,
            records, y_stride, page_stride, layer_start, eps, head,
            NUM_QUERIES, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, HALF, ROWS, EARLY_B, OVERLAP,
        )  # fmt: skip
        of_b = load_head(records + (tile + step) * 64)
