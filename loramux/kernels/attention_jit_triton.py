"""The attention kernel: one program computes one item (attention_items.py) for one kv head.

Query heads that share keys are rows of one block, so that keys and values are read once. Items of
the same rows leave partial results; the last of them to finish adds these up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.attention_fold_triton import fold, fold_seen, load_ordered_q
from loramux.kernels.launch_triton import begin_after_previous


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
    OVERLAP: tl.constexpr,
):
    """out = softmax(q K^T * scale) V for the item's rows, over the item's tokens."""
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence, first_row, num_rows, position, begin, end, num_items, first_item = load_item(
        items_ptr, item
    )
    keys_ptr = storage_ptr + layer_start + kv_head * HEAD_DIM
    pages_ptr = page_table_ptr + sequence.to(tl.int64) * page_table_stride
    begin_after_previous(OVERLAP)
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
    leave_item(
        acc, best, total, item, kv_head, first_row, num_rows, num_items, first_item, out_ptr,
        partial_ptr, log_sum_ptr, arrivals_ptr, KV_HEADS, GROUP, HEAD_DIM, ROWS, DIM, MERGED,
        STAGES=4,
    )  # fmt: skip


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
    STAGES: tl.constexpr,
):
    """Stores an item's rows, or its part of them; who is the last of several adds them up.

    acc [rows, DIM]: at most ROWS rows, not yet divided by their total
    STAGES: of the loop that adds up, all but one of which have MERGED numbers in shared memory
    """
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
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
                num_items, num_rows * GROUP, KV_HEADS, GROUP, HEAD_DIM, ROWS, DIM, MERGED, STAGES,
            )  # fmt: skip


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
    STAGES: tl.constexpr,
):
    """The items' results, weighted by their sums of exponentials; a few rows at a time."""
    # Past the multiprocessor's own cache (.cg): other programs wrote these just now.
    STEP_ROWS: tl.constexpr = 4 if ROWS <= 16 else 16
    STEP_ITEMS: tl.constexpr = MERGED // (STEP_ROWS * DIM) if MERGED >= 2 * STEP_ROWS * DIM else 2
    dim = tl.arange(0, DIM)
    for row_start in range(0, num_rows, STEP_ROWS):
        row = row_start + tl.arange(0, STEP_ROWS)
        best = tl.full([STEP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([STEP_ROWS], tl.float32)
        acc = tl.zeros([STEP_ROWS, DIM], tl.float32)
        for item_start in tl.range(0, num_items, STEP_ITEMS, num_stages=STAGES):
            item = item_start + tl.arange(0, STEP_ITEMS)
            slot = item[:, None] * (KV_HEADS * ROWS) + row[None, :]
            known = (item < num_items)[:, None] & (row < num_rows)[None, :]
            log_sum = tl.load(
                log_sum_ptr + slot, mask=known, other=float("-inf"), cache_modifier=".cg"
            )
            part = tl.load(
                partial_ptr + slot[:, :, None] * HEAD_DIM + dim[None, None, :],
                mask=known[:, :, None] & (dim < HEAD_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_best = tl.maximum(best, tl.max(log_sum, 0))
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
            weight = tl.exp2(log_sum - shift[None, :])
            fade = tl.exp2(best - shift)
            total = total * fade + tl.sum(weight, 0)
            acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
            best = new_best
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        inside = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
        at = (row // GROUP) * (KV_HEADS * GROUP * HEAD_DIM) + (row % GROUP) * HEAD_DIM
        tl.store(
            out_ptr + at[:, None] + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside
        )


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
    OVERLAP: tl.constexpr,
):
    """The keys and values of one row into its slot; a slot below 0 is no slot."""
    begin_after_previous(OVERLAP)
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
