"""The kernels of tail_triton: each takes a row, or a tile of rows that share their adapters."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.fused_triton import activate, load_angles, load_sum, rotate_halves, scaled
from loramux.kernels.launch_triton import begin_after_previous
from loramux.kernels.lora_shrink_triton import load_word


@triton.jit
def _load_group(record):
    """A record's group: where B begins in the pool, its ranks, its block of the tail, its weight.

    All words of a record are read together, before anything waits for them.
    """
    address = load_word(record + 1).to(tl.int64) * 64
    weight = load_word(record + 5).to(tl.float32, bitcast=True)
    return address, load_word(record + 2) & 255, load_word(record + 4), weight


@triton.jit
def _load_followers(record):
    """The units that follow a head, first and end."""
    first = load_word(record + 6)
    return first, first + load_word(record + 7)


@triton.jit
def _load_b(pool, group, first, count, width, N: tl.constexpr):
    """Columns first.. of a group [ranks, width], as [16, N]; `count` of them are there."""
    rank = tl.arange(0, 16)[:, None]
    column = tl.arange(0, N)[None, :]
    mask = (rank < group[1]) & (column < count)
    return tl.load(pool + group[0] + rank * width + first + column, mask=mask, other=0.0)


@triton.jit
def _load_h(  # noqa: PLR0913
    tail, h_step, tail_stride, group, num_rows, dtype, ROWS: tl.constexpr,
    part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """weight * h of a group: [ROWS, 16], rounded as it is multiplied; for one row [16] float32.

    tail: of a tile's first row, at the slice   h_step: from a block of the tail to the next
    part_step: from a part of the product to the next
    """
    at = tail + group[2] * h_step
    rank = tl.arange(0, 16)
    # A row without an adapter has no block: whatever there is may be no number.
    num_rows = tl.where(group[1] > 0, num_rows, 0)
    if ROWS == 1:
        h = load_sum(at + rank, rank < num_rows * 16, part_step, dtype, PARTS)
        h = h.to(tl.float32) * group[3]
    else:
        row = tl.arange(0, ROWS)[:, None]
        at += row * tail_stride + rank[None, :]
        h = load_sum(at, row < num_rows, part_step, dtype, PARTS)
        h = (h.to(tl.float32) * group[3]).to(dtype)
    return h


@triton.jit
def _add_product(total, h, b, ROWS: tl.constexpr):
    """total + h @ b: [ROWS, N] float32"""
    if ROWS == 1:
        total += tl.sum(b.to(tl.float32) * h[:, None], axis=0)[None, :]
    else:
        total = tl.dot(h, b, total, input_precision="ieee")
    return total


@triton.jit
def _add_followers(  # noqa: PLR0913
    total, units, pool, records, tail, tail_stride, h_step, num_rows, first, count, width,
    ROWS: tl.constexpr, N: tl.constexpr, part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """total [ROWS, N] float32 with all that the followers of a head add.

    records, tail: at the slice   units: of _load_followers
    """
    for unit in tl.range(units[0], units[1], num_stages=1):
        group = _load_group(records + unit * 64)
        b = _load_b(pool, group, first, count, width, N)
        h = _load_h(tail, h_step, tail_stride, group, num_rows, b.dtype, ROWS, part_step, PARTS)
        total = _add_product(total, h, b, ROWS)
    return total


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
    group = _load_group(record)
    followers = _load_followers(record)
    b = _load_b(pool, group, 0, SIZE, SIZE, BLOCK)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    begin_after_previous(OVERLAP)
    y = y_ptr + row * y_stride
    part_step = tl.num_programs(0).to(tl.int64) * y_stride
    at = row * SIZE + column
    total = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = load_sum(y + column, inside, part_step, residual_ptr.dtype.element_ty, PARTS)[None, :]
    h = _load_h(y + SIZE, 16, 0, group, 1, b.dtype, 1, part_step, PARTS)
    x = _add_product(x.to(tl.float32), h, b, 1)
    x = _add_followers(
        x, followers, pool, records, y + SIZE, 0, 16, 1, 0, SIZE, SIZE, 1, BLOCK,
        part_step, PARTS,
    )  # fmt: skip
    x = tl.reshape(x, (BLOCK,))
    _store_row(
        x, total, residual_ptr + at, out_ptr + at, weight, after_ptr, column, inside,
        eps, after_eps, SIZE,
    )  # fmt: skip


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
    OVERLAP: tl.constexpr,
):
    """y with its adapters; a whole one in place: what they do not change is not touched."""
    begin = tl.program_id(0)
    records += record_start
    first = tl.program_id(1) * BLOCK
    count = SIZE - first
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    part_step = all_rows.to(tl.int64) * y_stride
    for tile in tl.range(begin, load_word(work + 2), tl.num_programs(0), num_stages=1):
        record = records + tile * 64
        group = _load_group(record)
        followers = _load_followers(record)
        b = _load_b(pool, group, first, count, SIZE, BLOCK)
        num_rows = load_word(record + 2) >> 16
        if PARTS == 1:
            is_changed = (group[1] > 0) | (followers[0] < followers[1])
            num_rows = tl.where(is_changed, num_rows, 0)
        row_start = load_word(record + 3).to(tl.int64)
        y = y_ptr + row_start * y_stride
        if tile == begin:
            begin_after_previous(OVERLAP)
        inside = (row < num_rows) & (column < count)
        at = y + row * y_stride + first + column
        values = load_sum(at, inside, part_step, b.dtype, PARTS)
        h = _load_h(y + SIZE, 16, y_stride, group, num_rows, b.dtype, ROWS, part_step, PARTS)
        total = _add_product(values.to(tl.float32), h, b, ROWS)
        total = _add_followers(
            total, followers, pool, records, y + SIZE, y_stride, 16, num_rows, first, count, SIZE,
            ROWS, BLOCK, part_step, PARTS,
        )  # fmt: skip
        out = out_ptr + (row_start + row) * out_stride + first + column
        tl.store(out, total.to(values.dtype), mask=inside)


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
    OVERLAP: tl.constexpr,
):
    begin = tl.program_id(0)
    records += record_start
    first = tl.program_id(1) * BLOCK
    count = INNER - first
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    num_tiles = tl.num_programs(0)
    if ROWS > 1:
        num_tiles = load_word(work + 2)
    for tile in tl.range(begin, num_tiles, tl.num_programs(0), num_stages=1):
        record = records + tile * 64
        of_gate = _load_group(record)
        of_up = _load_group(record + 8)
        after_gate = _load_followers(record)
        after_up = _load_followers(record + 8)
        b_gate = _load_b(pool, of_gate, first, count, INNER, BLOCK)
        b_up = _load_b(pool, of_up, first, count, INNER, BLOCK)
        num_rows = load_word(record + 2) >> 16
        row_start = load_word(record + 3).to(tl.int64)
        if tile == begin:
            begin_after_previous(OVERLAP)
        inside = (row < num_rows) & (column < count)
        y = y_ptr + row_start * y_stride
        tail = y + 2 * INNER
        at = y + row * y_stride + first + column
        gate = tl.load(at, mask=inside, other=0.0)
        up = tl.load(at + INNER, mask=inside, other=0.0)
        h_gate = _load_h(tail, 32, y_stride, of_gate, num_rows, b_gate.dtype, ROWS)
        h_up = _load_h(tail + 16, 32, y_stride, of_up, num_rows, b_up.dtype, ROWS)
        gate = _add_product(gate.to(tl.float32), h_gate, b_gate, ROWS)
        up = _add_product(up.to(tl.float32), h_up, b_up, ROWS)
        gate = _add_followers(
            gate, after_gate, pool, records, tail, y_stride, 32, num_rows, first, count, INNER,
            ROWS, BLOCK,
        )  # fmt: skip
        up = _add_followers(
            up, after_up, pool, records + 8, tail + 16, y_stride, 32, num_rows, first, count,
            INNER, ROWS, BLOCK,
        )  # fmt: skip
        mixed = activate(gate, ACTIVATION) * up
        out = out_ptr + (row_start + row) * INNER + first + column
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
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has one head: its first and its second half, which are rotated by each other."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    OUTPUTS: tl.constexpr = (NUM_QUERIES + 2 * KV_HEADS) * HEAD_DIM
    begin = tl.program_id(0)
    head = tl.program_id(1)
    is_query = head < NUM_QUERIES
    is_value = head >= NUM_QUERIES + KV_HEADS
    slice_index = tl.where(is_query, 0, tl.where(is_value, 2, 1))
    width = tl.where(is_query, NUM_QUERIES, KV_HEADS) * HEAD_DIM
    # Of the slice, in heads.
    start = tl.where(is_query, 0, tl.where(is_value, NUM_QUERIES + KV_HEADS, NUM_QUERIES))
    first = (head - start) * HEAD_DIM
    records += record_start + slice_index * 8
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    num_tiles = tl.num_programs(0)
    if ROWS > 1:
        num_tiles = load_word(work + 2)
    for tile in tl.range(begin, num_tiles, tl.num_programs(0), num_stages=1):
        record = records + tile * 64
        of_b = _load_group(record)
        followers = _load_followers(record)
        b_low = _load_b(pool, of_b, first, MIDDLE, width, HALF)
        b_high = _load_b(pool, of_b, first + MIDDLE, MIDDLE, width, HALF)
        num_rows = load_word(record + 2) >> 16
        row_start = load_word(record + 3).to(tl.int64)
        inside = (row < num_rows) & (dim < MIDDLE)
        rows = row_start + row
        slot = tl.load(slots_ptr + rows, mask=row < num_rows, other=-1)
        is_turned = (row < tl.where(is_value, 0, num_rows)) & (dim < MIDDLE)
        angles = load_angles(cos_ptr, sin_ptr, rows * HEAD_DIM + dim, is_turned, MIDDLE)
        if tile == begin:
            begin_after_previous(OVERLAP)
        y = y_ptr + row_start * y_stride
        tail = y + OUTPUTS + slice_index * 16
        at = y + row * y_stride + head * HEAD_DIM + dim
        low = tl.load(at, mask=inside, other=0.0)
        high = tl.load(at + MIDDLE, mask=inside, other=0.0)
        h = _load_h(tail, 48, y_stride, of_b, num_rows, b_low.dtype, ROWS)
        low = _add_product(low.to(tl.float32), h, b_low, ROWS)
        high = _add_product(high.to(tl.float32), h, b_high, ROWS)
        low = _add_followers(
            low, followers, pool, records, tail, y_stride, 48, num_rows, first, MIDDLE, width,
            ROWS, HALF,
        )  # fmt: skip
        high = _add_followers(
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
