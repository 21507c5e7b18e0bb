"""The attention kernel: one CTA computes one split-KV work item (split_kv.py) for one KV head.

Query heads that share a KV head are rows of one tile, so that keys and values are read once. Work
items of the same rows write partial results; the last of them to finish reduces these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.attention.online_softmax import load_q_fragment, update, update_unmasked
from loramux.kernels.gpu.pdl import axis, pdl_wait_and_launch

_REDUCED_ROWS: tl.constexpr = tl.constexpr(4)
"""Rows of partial results that are reduced at once; four times as many for large tiles."""


@triton.jit
def attend_items(  # noqa: PLR0913
    q_ptr, storage_ptr, out_ptr, items_ptr, page_table_ptr, partial_ptr, log_sum_ptr,
    semaphores_ptr, q_stride, page_stride, page_table_stride, layer_start, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    TWO_PHASES: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr, REDUCED: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = softmax(q K^T * scale) V for the work item's rows, over its tokens.

    Matrices are multiplied in DTYPE, to which queries, keys and values are converted.
    """
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence, first_row, num_rows, position, begin, end, num_splits, first_split = load_item(
        items_ptr, item
    )
    keys_ptr = storage_ptr + layer_start + kv_head * HEAD_DIM
    pages_ptr = page_table_ptr + sequence.to(tl.int64) * page_table_stride
    pdl_wait_and_launch(PDL)
    if num_rows == 0:
        return

    q, positions = _load_q(
        q_ptr, q_stride, first_row, num_rows, position, kv_head, GROUP, HEAD_DIM, ROWS, DIM
    )
    if DTYPE == "float32":
        q = q.to(tl.float32)
    elif DTYPE == "float16":
        q = q.to(tl.float16)
    else:
        q = q.to(tl.bfloat16)
    if not CAUSAL and WINDOW == 0:
        acc, row_max, row_sum = _attend_unmasked(
            q, num_rows, keys_ptr, pages_ptr, page_stride, begin, end, scale, softcap, KV_HEADS,
            GROUP, HEAD_DIM, BLOCK_TOKENS, HAS_SOFTCAP, ROWS, TILES, TOKENS, DIM, PRECISION,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = _attend_masked(
            q, positions, position, keys_ptr, pages_ptr, page_stride, begin, end, scale, softcap,
            KV_HEADS, HEAD_DIM, BLOCK_TOKENS, WINDOW, HAS_SOFTCAP, TWO_PHASES, CAUSAL, ROWS, TILES,
            TOKENS, DIM, PRECISION,
        )  # fmt: skip
    if not CAUSAL and ROWS == 16 and GROUP <= 8:
        # The rows of one token are at most half of the tile.
        acc, row_max, row_sum = _first_half(acc), _first_half(row_max), _first_half(row_sum)
    store_item(
        acc, row_max, row_sum, item, kv_head, first_row, num_rows, num_splits, first_split, out_ptr,
        partial_ptr, log_sum_ptr, semaphores_ptr, KV_HEADS, GROUP, HEAD_DIM, ROWS, DIM, REDUCED,
    )  # fmt: skip


@triton.jit
def _load_q(  # noqa: PLR0913
    q_ptr, q_stride, first_row, num_rows, position, kv_head, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """q [ROWS, DIM] with zeros past the item's rows, and the position of each row."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    inside = (row // GROUP < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row % GROUP
    positions = position + row // GROUP
    if ROWS == 16 and HEAD_DIM == DIM:
        first_q = q_ptr + first_row.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
        q = load_q_fragment(first_q, num_rows * GROUP, q_stride, GROUP, HEAD_DIM)
    else:
        q_at = (first_row + row // GROUP).to(tl.int64) * q_stride + head * HEAD_DIM
        q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
    return q, positions


@triton.jit
def _attend_unmasked(  # noqa: PLR0913
    q, num_rows, keys_ptr, pages_ptr, page_stride, begin, end, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Decode: every row sees every token of the item."""
    acc = tl.zeros([ROWS, DIM], tl.float32)
    row = tl.arange(0, ROWS)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    # Rows past the last have a maximum that no score exceeds, so their weights are zero: tensor
    # cores draw less power for zeros, and most of a decode's 16 rows are padding.
    row_max = tl.where(row // GROUP < num_rows, row_max, 1e30)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(begin, end, TILES * TOKENS):
        acc, row_max, sums = update_unmasked(
            q, acc, row_max, sums, keys_ptr, pages_ptr, page_stride, start, end, scale, softcap,
            KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, HAS_SOFTCAP, TILES, TOKENS, DIM, PRECISION,
        )  # fmt: skip
    return acc, row_max, tl.sum(sums, 1)


@triton.jit
def _attend_masked(  # noqa: PLR0913
    q, positions, position, keys_ptr, pages_ptr, page_stride, begin, end, scale, softcap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TWO_PHASES: tl.constexpr,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros([ROWS, DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    masked_from = begin
    if TWO_PHASES:
        # Tokens that every row sees need no mask.
        seen_by_all = tl.maximum(tl.minimum(position + 1, end) - begin, 0)
        masked_from = begin + seen_by_all // (TILES * TOKENS) * (TILES * TOKENS)
        for start in range(begin, masked_from, TILES * TOKENS):
            acc, row_max, row_sum = update(
                q, acc, row_max, row_sum, keys_ptr, pages_ptr, page_stride, start, end, positions,
                scale, softcap, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, 0, HAS_SOFTCAP,
                CAUSAL, False, TILES, TOKENS, DIM, PRECISION,
            )  # fmt: skip
    for start in range(masked_from, end, TILES * TOKENS):
        acc, row_max, row_sum = update(
            q, acc, row_max, row_sum, keys_ptr, pages_ptr, page_stride, start, end, positions,
            scale, softcap, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, WINDOW, HAS_SOFTCAP,
            CAUSAL, True, TILES, TOKENS, DIM, PRECISION,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _first_half(x):
    """Return the first half of the rows; each thread holds both halves, so that no data moves."""
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 1:
        first, _ = tl.split(tl.trans(tl.reshape(x, (2, HALF))))
    else:
        first, _ = tl.split(tl.permute(tl.reshape(x, (2, HALF, x.shape[1])), (1, 2, 0)))
    return first


@triton.jit
def load_item(items_ptr, item):
    """Return the fields of a work item: see split_kv.ITEM_FIELDS."""
    at = items_ptr + item * 8
    sequence = tl.load(at)
    first_row = tl.load(at + 1)
    num_rows = tl.load(at + 2)
    position = tl.load(at + 3)
    begin = tl.load(at + 4)
    end = tl.load(at + 5)
    num_splits = tl.load(at + 6)
    first_split = tl.load(at + 7)
    return sequence, first_row, num_rows, position, begin, end, num_splits, first_split


@triton.jit
def store_item(  # noqa: PLR0913
    acc,
    row_max,
    row_sum,
    item,
    kv_head,
    first_row,
    num_rows,
    num_splits,
    first_split,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    semaphores_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    REDUCED: tl.constexpr,
):
    """Store an item's rows, or its partial result; the last split to finish reduces all of them.

    acc [rows, DIM]: at most ROWS rows, not yet divided by row_sum
    """
    acc = acc * _inverse(row_sum)[:, None]
    row = tl.arange(0, acc.shape[0])
    dim = tl.arange(0, DIM)
    inside = (row // GROUP < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    out_stride: tl.constexpr = KV_HEADS * GROUP * HEAD_DIM
    if num_splits <= 1:
        out_at = (first_row + row // GROUP).to(tl.int64) * out_stride
        out_at += (kv_head * GROUP + row % GROUP) * HEAD_DIM
        out_at = out_at[:, None] + dim[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        slot = (item * KV_HEADS + kv_head).to(tl.int64) * ROWS + row
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        log_sum = row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))
        tl.store(log_sum_ptr + slot, log_sum)
        tl.debug_barrier()
        semaphores_ptr += first_split * KV_HEADS + kv_head
        if tl.atomic_add(semaphores_ptr, 1, sem="acq_rel") == num_splits - 1:
            tl.store(semaphores_ptr, 0)
            first_slot = (first_split * KV_HEADS + kv_head).to(tl.int64) * ROWS
            out_ptr += first_row.to(tl.int64) * out_stride + kv_head * GROUP * HEAD_DIM
            _reduce_splits(
                out_ptr, partial_ptr + first_slot * HEAD_DIM, log_sum_ptr + first_slot,
                num_splits, num_rows * GROUP, KV_HEADS, GROUP, HEAD_DIM, ROWS, DIM, REDUCED,
            )  # fmt: skip


@triton.jit
def _inverse(row_sum):
    return 1.0 / tl.where(row_sum > 0, row_sum, 1.0)


@triton.jit
def _reduce_splits(  # noqa: PLR0913
    out_ptr, partial_ptr, log_sum_ptr, num_splits, num_rows, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    REDUCED: tl.constexpr,
):  # fmt: skip
    """Add the splits' results, weighted by their sums of exponentials, a few rows at a time.

    All other CTAs have ended and the next kernel waits, so loads of REDUCED elements are in flight
    while as many are added, and each thread holds the weights of its own row.
    """
    STEP_ROWS: tl.constexpr = _REDUCED_ROWS if ROWS <= 16 else 4 * _REDUCED_ROWS
    SPLITS: tl.constexpr = max(1, REDUCED // (STEP_ROWS * DIM))
    row, dim = _reduced_rows(STEP_ROWS), _reduced_columns(DIM)
    for row_start in tl.range(0, num_rows, STEP_ROWS, num_stages=1):
        splits_ptr = partial_ptr + row_start * HEAD_DIM
        logs_ptr = log_sum_ptr + row_start
        left = num_rows - row_start
        first = _load_splits(
            splits_ptr,
            logs_ptr,
            0,
            num_splits,
            left,
            KV_HEADS,
            HEAD_DIM,
            ROWS,
            DIM,
            SPLITS,
            STEP_ROWS,
        )
        second = _load_splits(
            splits_ptr, logs_ptr, SPLITS, num_splits, left, KV_HEADS, HEAD_DIM, ROWS, DIM, SPLITS,
            STEP_ROWS,
        )  # fmt: skip
        row_sum = tl.zeros_like(_along_threads(row, DIM).to(tl.float32))
        row_max = row_sum + float("-inf")
        acc = tl.zeros_like((row + dim).to(tl.float32))
        for start in tl.range(2 * SPLITS, num_splits + 2 * SPLITS, 2 * SPLITS, num_stages=1):
            acc, row_max, row_sum = _add_splits(first, acc, row_max, row_sum)
            first = _load_splits(
                splits_ptr, logs_ptr, start, num_splits, left, KV_HEADS, HEAD_DIM, ROWS, DIM,
                SPLITS, STEP_ROWS,
            )  # fmt: skip
            acc, row_max, row_sum = _add_splits(second, acc, row_max, row_sum)
            second = _load_splits(
                splits_ptr, logs_ptr, start + SPLITS, num_splits, left, KV_HEADS, HEAD_DIM, ROWS,
                DIM, SPLITS, STEP_ROWS,
            )  # fmt: skip
        acc *= _inverse(row_sum)
        at = (row_start + row) // GROUP * (KV_HEADS * GROUP * HEAD_DIM)
        at += (row_start + row) % GROUP * HEAD_DIM + dim
        inside = (row < left) & (dim < HEAD_DIM)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


# The axes of a reduction: threads along a row, rows, more of a row, splits, four elements. The rows
# that are reduced at once belong to one warp, and the splits of an element to one thread.


@triton.jit
def _reduced_rows(ROWS: tl.constexpr):
    return axis(ROWS, 1, 5)


@triton.jit
def _reduced_columns(DIM: tl.constexpr):
    THREADS: tl.constexpr = min(8, DIM // 4)
    dim = axis(THREADS, 0, 5) + axis(DIM // (4 * THREADS), 2, 5) * THREADS
    return dim * 4 + axis(4, 4, 5)


@triton.jit
def _along_threads(x, DIM: tl.constexpr):
    """x for each thread along a row."""
    return x + 0 * axis(min(8, DIM // 4), 0, 5)


@triton.jit
def _load_splits(  # noqa: PLR0913
    partial_ptr, log_sum_ptr, start, num_splits, num_rows, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    STEP_ROWS: tl.constexpr,
):  # fmt: skip
    """Partial results of splits from `start` on, and the logarithms of their weights.

    Splits past the end clamp to the last one with weight zero, so that loads need no mask.
    """
    item = _along_threads(start + axis(SPLITS, 3, 5), DIM)
    row = tl.minimum(_reduced_rows(STEP_ROWS), num_rows - 1)
    slot = tl.minimum(item, num_splits - 1) * (KV_HEADS * ROWS) + row
    dim = _reduced_columns(DIM)
    if DIM != HEAD_DIM:
        dim = tl.minimum(dim, HEAD_DIM - 1)
    # Bypasses the SM's L1 cache (.cg): other CTAs have just written these.
    log_sum = tl.load(log_sum_ptr + slot, cache_modifier=".cg")
    log_sum = tl.where(item < num_splits, log_sum, float("-inf"))
    return tl.load(partial_ptr + slot * HEAD_DIM + dim, cache_modifier=".cg"), log_sum


@triton.jit
def _add_splits(splits, acc, row_max, row_sum):
    SPLIT_AXIS: tl.constexpr = 3
    split, log_sum = splits
    new_max = tl.maximum(row_max, tl.max(log_sum, SPLIT_AXIS, keep_dims=True))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(log_sum - shift)
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weight, SPLIT_AXIS, keep_dims=True)
    acc = acc * rescale + tl.sum(split * weight, SPLIT_AXIS, keep_dims=True)
    return acc, new_max, row_sum


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
    """Store the keys and values of one row in its slot, unless the slot is negative."""
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
