"""The attention kernel: one program computes one item (attention_items.py) for one kv head.

Query heads that share keys are rows of one block, so that keys and values are read once. Items of
the same rows leave partial results; the last of them to finish adds these up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.attention.online_softmax import fold, fold_seen, load_ordered_q
from loramux.kernels.gpu.pdl import axis, pdl_wait_and_launch

_MERGED_ROWS: tl.constexpr = tl.constexpr(4)
"""Rows of partial results that are added up at once; four times as many of large tiles."""


@triton.jit
def attend_items(  # noqa: PLR0913
    q_ptr,
    storage_ptr,
    out_ptr,
    items_ptr,
    page_table_ptr,
    partial_ptr,
    log_sum_ptr,
    arrivals_ptr,
    q_stride,
    page_stride,
    page_table_stride,
    layer_start,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TWO_PHASES: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    MERGED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = softmax(q K^T * scale) V for the item's rows, over the item's tokens."""
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence, first_row, num_rows, position, begin, end, num_items, first_item = load_item(
        items_ptr, item
    )
    keys_ptr = storage_ptr + layer_start + kv_head * HEAD_DIM
    pages_ptr = page_table_ptr + sequence.to(tl.int64) * page_table_stride
    pdl_wait_and_launch(PDL)
    if num_rows == 0:
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    inside = (row // GROUP < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row % GROUP
    positions = position + row // GROUP
    if ROWS == 16 and HEAD_DIM == DIM:
        first_q = q_ptr + first_row.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
        q = load_ordered_q(first_q, num_rows * GROUP, q_stride, GROUP, HEAD_DIM)
    else:
        q_at = (first_row + row // GROUP).to(tl.int64) * q_stride + head * HEAD_DIM
        q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    if not CAUSAL and WINDOW == 0:
        # No score is above that of a row which is none, so its weights are zero: matrix units draw
        # less power for zeros, and of 16 rows a decode has as many as query heads share a kv head.
        best = tl.where(row // GROUP < num_rows, best, 1e30)
        sums = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(begin, end, TILES * TOKENS):
            acc, best, sums = fold_seen(
                q, acc, best, sums, keys_ptr, pages_ptr, page_stride, start, end, scale, softcap,
                KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, HAS_SOFTCAP, TILES, TOKENS, DIM,
                PRECISION,
            )  # fmt: skip
        total = tl.sum(sums, 1)
    else:
        total = tl.zeros([ROWS], tl.float32)
        masked_from = begin
        if TWO_PHASES:
            # Tokens that every row sees need no mask.
            seen_by_all = tl.maximum(tl.minimum(position + 1, end) - begin, 0)
            masked_from = begin + seen_by_all // (TILES * TOKENS) * (TILES * TOKENS)
            for start in range(begin, masked_from, TILES * TOKENS):
                acc, best, total = fold(
                    q, acc, best, total, keys_ptr, pages_ptr, page_stride, start, end, positions,
                    scale, softcap, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, 0, HAS_SOFTCAP,
                    CAUSAL, False, TILES, TOKENS, DIM, PRECISION,
                )  # fmt: skip
        for start in range(masked_from, end, TILES * TOKENS):
            acc, best, total = fold(
                q, acc, best, total, keys_ptr, pages_ptr, page_stride, start, end, positions,
                scale, softcap, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, WINDOW, HAS_SOFTCAP,
                CAUSAL, True, TILES, TOKENS, DIM, PRECISION,
            )  # fmt: skip
    if not CAUSAL and ROWS == 16 and GROUP <= 8:
        # One token's rows: half of the tile at most.
        acc, best, total = _first_half(acc), _first_half(best), _first_half(total)
    leave_item(
        acc, best, total, item, kv_head, first_row, num_rows, num_items, first_item, out_ptr,
        partial_ptr, log_sum_ptr, arrivals_ptr, KV_HEADS, GROUP, HEAD_DIM, ROWS, DIM, MERGED,
    )  # fmt: skip


@triton.jit
def _first_half(x):
    """Of the rows. Lanes of matrix units have both halves, so that nothing moves."""
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 1:
        first, _ = tl.split(tl.trans(tl.reshape(x, (2, HALF))))
    else:
        first, _ = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1])), (1, 2, 0)))
    return first


@triton.jit
def load_item(items_ptr, item):
    """The fields of an item: see attention_items.ITEM_FIELDS."""
    at = items_ptr + item * 8
    sequence = tl.load(at)
    first_row = tl.load(at + 1)
    num_rows = tl.load(at + 2)
    position = tl.load(at + 3)
    begin = tl.load(at + 4)
    end = tl.load(at + 5)
    num_items = tl.load(at + 6)
    first_item = tl.load(at + 7)
    return sequence, first_row, num_rows, position, begin, end, num_items, first_item


@triton.jit
def leave_item(  # noqa: PLR0913
    acc,
    best,
    total,
    item,
    kv_head,
    first_row,
    num_rows,
    num_items,
    first_item,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    arrivals_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Stores an item's rows, or its part of them; who is the last of several adds them up.

    acc [rows, DIM]: at most ROWS rows, not yet divided by their total
    """
    acc = acc * _inverse(total)[:, None]
    row = tl.arange(0, acc.shape[0])
    dim = tl.arange(0, DIM)
    inside = (row // GROUP < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    out_stride: tl.constexpr = KV_HEADS * GROUP * HEAD_DIM
    if num_items <= 1:
        out_at = (first_row + row // GROUP).to(tl.int64) * out_stride
        out_at += (kv_head * GROUP + row % GROUP) * HEAD_DIM
        out_at = out_at[:, None] + dim[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        slot = (item * KV_HEADS + kv_head).to(tl.int64) * ROWS + row
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        log_sum = best + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(log_sum_ptr + slot, log_sum)
        tl.debug_barrier()
        arrivals_ptr += first_item * KV_HEADS + kv_head
        if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == num_items - 1:
            tl.store(arrivals_ptr, 0)
            first_slot = (first_item * KV_HEADS + kv_head).to(tl.int64) * ROWS
            out_ptr += first_row.to(tl.int64) * out_stride + kv_head * GROUP * HEAD_DIM
            _merge_items(
                out_ptr, partial_ptr + first_slot * HEAD_DIM, log_sum_ptr + first_slot,
                num_items, num_rows * GROUP, KV_HEADS, GROUP, HEAD_DIM, ROWS, DIM, MERGED,
            )  # fmt: skip


@triton.jit
def _inverse(total):
    return 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit
def _merge_items(  # noqa: PLR0913
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    num_items,
    num_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    MERGED: tl.constexpr,
):
    """The items' results, weighted by their sums of exponentials; a few rows at a time.

    All others have ended, and the next kernel waits: so loads of MERGED numbers are under way while
    as many are added up, and a lane has what it needs of a row's weights itself.
    """
    STEP_ROWS: tl.constexpr = _MERGED_ROWS if ROWS <= 16 else 4 * _MERGED_ROWS
    ITEMS: tl.constexpr = max(1, MERGED // (STEP_ROWS * DIM))
    row, dim = _merged_rows(STEP_ROWS), _merged_columns(DIM)
    for row_start in tl.range(0, num_rows, STEP_ROWS, num_stages=1):
        parts_ptr = partial_ptr + row_start * HEAD_DIM
        logs_ptr = log_sum_ptr + row_start
        left = num_rows - row_start
        first = _load_parts(
            parts_ptr, logs_ptr, 0, num_items, left, KV_HEADS, HEAD_DIM, ROWS, DIM, ITEMS, STEP_ROWS
        )
        second = _load_parts(
            parts_ptr, logs_ptr, ITEMS, num_items, left, KV_HEADS, HEAD_DIM, ROWS, DIM, ITEMS,
            STEP_ROWS,
        )  # fmt: skip
        total = tl.zeros_like(_along_lanes(row, DIM).to(tl.float32))
        best = total + float("-inf")
        acc = tl.zeros_like((row + dim).to(tl.float32))
        for start in tl.range(2 * ITEMS, num_items + 2 * ITEMS, 2 * ITEMS, num_stages=1):
            acc, best, total = _add_parts(first, acc, best, total)
            first = _load_parts(
                parts_ptr, logs_ptr, start, num_items, left, KV_HEADS, HEAD_DIM, ROWS, DIM, ITEMS,
                STEP_ROWS,
            )  # fmt: skip
            acc, best, total = _add_parts(second, acc, best, total)
            second = _load_parts(
                parts_ptr, logs_ptr, start + ITEMS, num_items, left, KV_HEADS, HEAD_DIM, ROWS, DIM,
                ITEMS, STEP_ROWS,
            )  # fmt: skip
        acc *= _inverse(total)
        at = (row_start + row) // GROUP * (KV_HEADS * GROUP * HEAD_DIM)
        at += (row_start + row) % GROUP * HEAD_DIM + dim
        inside = (row < left) & (dim < HEAD_DIM)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


# The axes of what is added up: lanes along a row, rows, more of a row, items, four numbers. So what
# rows there are at once are lanes of one warp, and items are numbers of one lane.


@triton.jit
def _merged_rows(ROWS: tl.constexpr):
    return axis(ROWS, 1, 5)


@triton.jit
def _merged_columns(DIM: tl.constexpr):
    LANES: tl.constexpr = min(8, DIM // 4)
    dim = axis(LANES, 0, 5) + axis(DIM // (4 * LANES), 2, 5) * LANES
    return dim * 4 + axis(4, 4, 5)


@triton.jit
def _along_lanes(x, DIM: tl.constexpr):
    """x for each lane along a row."""
    return x + 0 * axis(min(8, DIM // 4), 0, 5)


@triton.jit
def _load_parts(  # noqa: PLR0913
    partial_ptr, log_sum_ptr, start, num_items, num_rows, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ITEMS: tl.constexpr,
    STEP_ROWS: tl.constexpr,
):  # fmt: skip
    """Of items from `start` on, and the logarithms of their weights. Past the last item that one
    again, which weighs nothing: no mask, and nothing to be set to zero."""
    item = _along_lanes(start + axis(ITEMS, 3, 5), DIM)
    row = tl.minimum(_merged_rows(STEP_ROWS), num_rows - 1)
    slot = tl.minimum(item, num_items - 1) * (KV_HEADS * ROWS) + row
    dim = _merged_columns(DIM)
    if DIM != HEAD_DIM:
        dim = tl.minimum(dim, HEAD_DIM - 1)
    # Past the multiprocessor's own cache (.cg): other programs wrote these just now.
    log_sum = tl.load(log_sum_ptr + slot, cache_modifier=".cg")
    log_sum = tl.where(item < num_items, log_sum, float("-inf"))
    return tl.load(partial_ptr + slot * HEAD_DIM + dim, cache_modifier=".cg"), log_sum


@triton.jit
def _add_parts(parts, acc, best, total):
    ITEM_AXIS: tl.constexpr = 3
    part, log_sum = parts
    new_best = tl.maximum(best, tl.max(log_sum, ITEM_AXIS, keep_dims=True))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(log_sum - shift)
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weight, ITEM_AXIS, keep_dims=True)
    acc = acc * fade + tl.sum(part * weight, ITEM_AXIS, keep_dims=True)
    return acc, new_best, total


@triton.jit
def write_rows(  # noqa: PLR0913
    k_ptr,
    v_ptr,
    storage_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    page_stride,
    layer_start,
    BLOCK_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The keys and values of one row into its slot; a slot below 0 is no slot."""
    pdl_wait_and_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        at = slot // BLOCK_TOKENS * page_stride.to(tl.int64) + layer_start
        at += slot % BLOCK_TOKENS * SIZE
        column = tl.arange(0, BLOCK)
        inside = column < SIZE
        k = tl.load(k_ptr + row * k_stride + column, mask=inside)
        v = tl.load(v_ptr + row * v_stride + column, mask=inside)
        tl.store(storage_ptr + at + column, k, mask=inside)
        tl.store(storage_ptr + at + BLOCK_TOKENS * SIZE + column, v, mask=inside)
