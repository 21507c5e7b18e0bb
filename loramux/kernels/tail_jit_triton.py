"""The kernels of tail_triton: each takes a row, or a tile of rows that share their adapters."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.fused_triton import activate, scaled
from loramux.kernels.launch_triton import begin_after_previous
from loramux.kernels.lora_shrink_triton import load_word


@triton.jit
def _load_b(pool, record, first, count, width, N: tl.constexpr):
    """Columns first.. of a record's group [ranks, width], as [16, N]; `count` of them are there."""
    address = load_word(record + 1).to(tl.int64) * 64
    ranks = load_word(record + 2) & 255
    rank = tl.arange(0, 16)[:, None]
    column = tl.arange(0, N)[None, :]
    mask = (rank < ranks) & (column < count)
    return tl.load(pool + address + rank * width + first + column, mask=mask, other=0.0)


@triton.jit
def _times_h(b, h, h_stride, record, num_rows, ROWS: tl.constexpr):
    """weight * h @ b: [ROWS, N] float32. h: of a tile's first row, at the record's slice."""
    weight = load_word(record + 5).to(tl.float32, bitcast=True)
    rank = tl.arange(0, 16)
    if ROWS == 1:
        # Rounded as the matrix units do it: a row alone and a row in a tile get the same h.
        sums = (tl.load(h + rank).to(tl.float32) * weight).to(b.dtype).to(tl.float32)
        change = tl.sum(b.to(tl.float32) * sums[:, None], axis=0)[None, :]
    else:
        row = tl.arange(0, ROWS)[:, None]
        sums = tl.load(h + row * h_stride + rank[None, :], mask=row < num_rows, other=0.0)
        sums = (sums.to(tl.float32) * weight).to(b.dtype)
        change = tl.dot(sums, b, input_precision="ieee")
    return change


@triton.jit
def _add_units(  # noqa: PLR0913
    values, b, pool, records, unit, tail, tail_stride, h_step, num_rows, first, count, width,
    ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """values [ROWS, N], in its own dtype, with all that a head and its followers add.

    records, tail: at the slice   b: the head's   h_step: from a block of the tail to the next
    """
    record = records + unit * 64
    num_more = load_word(record + 7)
    if (load_word(record + 2) & 255) + num_more > 0:
        total = values.to(tl.float32)
        h = tail + load_word(record + 4) * h_step
        total += _times_h(b, h, tail_stride, record, num_rows, ROWS)
        more = load_word(record + 6)
        for index in tl.range(num_more, num_stages=1):
            next_record = records + (more + index) * 64
            next_b = _load_b(pool, next_record, first, count, width, N)
            h = tail + load_word(next_record + 4) * h_step
            total += _times_h(next_b, h, tail_stride, next_record, num_rows, ROWS)
        values = total.to(values.dtype)
    return values


@triton.jit
def _store_row(  # noqa: PLR0913
    x, total, residual_at, out_at, weight, after_ptr, column, inside, eps, after_eps,
    SIZE: tl.constexpr,
):  # fmt: skip
    """What add_norm does with one row: x, which was rounded, is added, and the sum normed."""
    if after_ptr is not None:
        after = tl.load(after_ptr + column, mask=column < SIZE, other=0.0)
        x = scaled(x.to(tl.float32), after, after_eps, SIZE).to(x.dtype)
    # The sum is normed as it is stored, rounded.
    stored = (total + x.to(tl.float32)).to(residual_at.dtype.element_ty)
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
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    records += record_start
    unit = load_word(work + row_map_start + row)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    b = _load_b(pool, records + unit * 64, 0, SIZE, SIZE, BLOCK)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    begin_after_previous(OVERLAP)
    y = y_ptr + row * y_stride
    at = row * SIZE + column
    total = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(y + column, mask=inside, other=0.0)[None, :]
    x = _add_units(x, b, pool, records, unit, y + SIZE, 0, 16, 1, 0, SIZE, SIZE, 1, BLOCK)
    x = tl.reshape(x, (BLOCK,))
    _store_row(
        x, total, residual_ptr + at, out_ptr + at, weight, after_ptr, column, inside,
        eps, after_eps, SIZE,
    )  # fmt: skip


@triton.jit
def _load_ranks(pool, record, width, N: tl.constexpr):
    """B of a record's group as 16 rows [N]: what is added rank by rank needs no other order."""
    address = load_word(record + 1).to(tl.int64) * 64
    ranks = load_word(record + 2) & 255
    column = tl.arange(0, N)
    rows = ()
    for rank in tl.static_range(16):
        mask = column < tl.where(ranks > rank, width, 0)
        row = tl.load(pool + address + rank * width + column, mask=mask, other=0.0)
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


@triton.jit
def _add_ranks(totals, b, h, h_stride, record, num_rows, ROWS: tl.constexpr):
    """totals + weight * h @ b, row by row: h is read as one number, which all columns share.

    totals: ROWS of [N] float32   b: of _load_ranks   h: of the first row
    """
    weight = load_word(record + 5).to(tl.float32, bitcast=True)
    added = ()
    for row in tl.static_range(ROWS):
        total = totals[row]
        for rank in tl.static_range(16):
            factor = tl.load(h + row * h_stride + rank, mask=row < num_rows, other=0.0)
            # Rounded as in _times_h.
            factor = (factor.to(tl.float32) * weight).to(b[rank].dtype).to(tl.float32)
            total += factor * b[rank].to(tl.float32)
        added = added + (total,)  # type: ignore[assignment]
    return added


@triton.jit
def add_norm_rows_kernel(  # noqa: PLR0913
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
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has ROWS rows of a tile, which share what is read of B."""
    begin = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    records += record_start
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    for tile in tl.range(begin, load_word(work + 2), tl.num_programs(0), num_stages=1):
        record = records + tile * 64
        num_rows = (load_word(record + 2) >> 16) - first
        num_more = load_word(record + 7)
        if tile == begin:
            begin_after_previous(OVERLAP)
        if num_rows > 0:
            start = load_word(record + 3).to(tl.int64) + first
            y = y_ptr + start * y_stride
            rows = ()
            for row in tl.static_range(ROWS):
                inside = column < tl.where(row < num_rows, SIZE, 0)
                x = tl.load(y + row * y_stride + column, mask=inside, other=0.0)
                rows = rows + (x.to(tl.float32),)  # type: ignore[assignment]
            if (load_word(record + 2) & 255) + num_more > 0:
                h = y + SIZE + load_word(record + 4) * 16
                b = _load_ranks(pool, record, SIZE, BLOCK)
                rows = _add_ranks(rows, b, h, y_stride, record, num_rows, ROWS)
                more = load_word(record + 6)
                for index in tl.range(num_more, num_stages=1):
                    next_record = records + (more + index) * 64
                    next_b = _load_ranks(pool, next_record, SIZE, BLOCK)
                    h = y + SIZE + load_word(next_record + 4) * 16
                    rows = _add_ranks(rows, next_b, h, y_stride, next_record, num_rows, ROWS)
            for row in tl.static_range(ROWS):
                inside = column < tl.where(row < num_rows, SIZE, 0)
                at = (start + row) * SIZE + column
                total = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
                x = rows[row].to(y_ptr.dtype.element_ty)
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
        b_gate = _load_b(pool, record, first, count, INNER, BLOCK)
        b_up = _load_b(pool, record + 8, first, count, INNER, BLOCK)
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
        gate = _add_units(
            gate, b_gate, pool, records, tile, tail, y_stride, 32, num_rows, first, count, INNER,
            ROWS, BLOCK,
        )  # fmt: skip
        up = _add_units(
            up, b_up, pool, records + 8, tile, tail + 16, y_stride, 32, num_rows, first, count,
            INNER, ROWS, BLOCK,
        )  # fmt: skip
        mixed = activate(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
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
        b_low = _load_b(pool, record, first, MIDDLE, width, HALF)
        b_high = _load_b(pool, record, first + MIDDLE, MIDDLE, width, HALF)
        num_rows = load_word(record + 2) >> 16
        row_start = load_word(record + 3).to(tl.int64)
        inside = (row < num_rows) & (dim < MIDDLE)
        rows = row_start + row
        slot = tl.load(slots_ptr + rows, mask=row < num_rows, other=-1)
        if tile == begin:
            begin_after_previous(OVERLAP)
        y = y_ptr + row_start * y_stride
        tail = y + OUTPUTS + slice_index * 16
        at = y + row * y_stride + head * HEAD_DIM + dim
        low = tl.load(at, mask=inside, other=0.0)
        high = tl.load(at + MIDDLE, mask=inside, other=0.0)
        low = _add_units(
            low, b_low, pool, records, tile, tail, y_stride, 48, num_rows, first, MIDDLE, width,
            ROWS, HALF,
        )  # fmt: skip
        high = _add_units(
            high, b_high, pool, records, tile, tail, y_stride, 48, num_rows, first + MIDDLE,
            MIDDLE, width, ROWS, HALF,
        )  # fmt: skip
        if not is_value:
            low, high = _rotate(
                low, high, cos_ptr, sin_ptr, norm_ptr, eps, rows * HEAD_DIM + dim, head, inside,
                HEAD_DIM, HALF,
            )  # fmt: skip
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
def _rotate(  # noqa: PLR0913
    low_values, high_values, cos_ptr, sin_ptr, norm_ptr, eps, at, head, inside,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The halves of a head, normed if there is a weight, and rotated: [rows, HALF] each."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    low = low_values.to(tl.float32)
    high = high_values.to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        dim = tl.arange(0, HALF)[None, :]
        weights = norm_ptr + head * HEAD_DIM + dim
        low *= inverse * tl.load(weights, mask=dim < MIDDLE, other=0.0).to(tl.float32)
        high *= inverse * tl.load(weights + MIDDLE, mask=dim < MIDDLE, other=0.0).to(tl.float32)
    low_cos = tl.load(cos_ptr + at, mask=inside, other=0.0)
    low_sin = tl.load(sin_ptr + at, mask=inside, other=0.0)
    high_cos = tl.load(cos_ptr + at + MIDDLE, mask=inside, other=0.0)
    high_sin = tl.load(sin_ptr + at + MIDDLE, mask=inside, other=0.0)
    low_out = low * low_cos.to(tl.float32) + high * low_sin.to(tl.float32)
    high_out = high * high_cos.to(tl.float32) + low * high_sin.to(tl.float32)
    return low_out.to(low_values.dtype), high_out.to(high_values.dtype)
