"""Decode attention that loads K and V tiles by TMA.

Decode steps of many rows are power-limited, so work that is saved here speeds up the GEMMs. The
queries are the second MMA operand: 8 columns instead of 16 rows, and half as many MMAs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.attention.kernel import load_item, store_item
from loramux.kernels.gpu.attention.online_softmax import LOG2_E, RESCALE_MARGIN, apply_softcap
from loramux.kernels.gpu.pdl import axis, pdl_wait_and_launch

TOKENS: tl.constexpr = tl.constexpr(16)
"""Tokens of a tile, which is a whole page of one layer."""
MAX_ROWS: tl.constexpr = tl.constexpr(8)
"""Query heads that share a kv head."""


@triton.jit(do_not_specialize=["layer_tile"])
def attend_decodes(  # noqa: PLR0913
    q_ptr, tiles, out_ptr, items_ptr, page_table_ptr, partial_ptr, log_sum_ptr, semaphores_ptr,
    q_stride, page_tiles, page_table_stride, layer_tile, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROWS: tl.constexpr, REDUCED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`attend_items` for work items of one token that sees all of their tokens.

    tiles: TMA descriptor of [keys or values of a page's layer, TOKENS, KV_HEADS * HEAD_DIM] with
    blocks of one head   page_tiles: tiles of a page, two per layer
    """
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence, first_row, num_rows, _, begin, end, num_splits, first_split = load_item(
        items_ptr, item
    )
    pages_ptr = page_table_ptr + sequence.to(tl.int64) * page_table_stride + begin // TOKENS
    pdl_wait_and_launch(PDL)
    if num_rows == 0:
        return

    q_ptr += first_row.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
    q = _load_queries(q_ptr, num_rows * GROUP, HEAD_DIM)
    # No score exceeds the maximum of a padding row, so its weights are zero.
    row_max = tl.where(tl.arange(0, MAX_ROWS) < num_rows * GROUP, float("-inf"), 1e30)
    limit = row_max
    acc = tl.zeros([HEAD_DIM, MAX_ROWS], tl.float32)
    sums = tl.zeros([TOKENS, MAX_ROWS], tl.float32)
    factor = LOG2_E if HAS_SOFTCAP else scale * LOG2_E
    token = tl.arange(0, TOKENS)
    for number in tl.range(0, tl.cdiv(end - begin, TOKENS)):
        tile = tl.load(pages_ptr + number) * page_tiles + layer_tile
        # TMA does not load tokens past the end: the last tile starts before its page, with zeros.
        ahead = tl.minimum(end - begin - number * TOKENS, TOKENS) - TOKENS
        k = tl.reshape(tiles.load([tile, ahead, kv_head * HEAD_DIM]), (TOKENS, HEAD_DIM))
        v = tl.reshape(tiles.load([tile + 1, ahead, kv_head * HEAD_DIM]), (TOKENS, HEAD_DIM))
        scores = tl.dot(k, q)
        if HAS_SOFTCAP:
            scores = apply_softcap(scores, scale, softcap)
        scores = tl.where((token + ahead >= 0)[:, None], scores, float("-inf"))
        acc, row_max, limit, sums = _update(scores, v, acc, row_max, limit, sums, factor)
    store_item(
        tl.trans(acc), row_max, tl.sum(sums, 0), item, kv_head, first_row, num_rows, num_splits,
        first_split, out_ptr, partial_ptr, log_sum_ptr, semaphores_ptr, KV_HEADS, GROUP, HEAD_DIM,
        ROWS, HEAD_DIM, REDUCED,
    )  # fmt: skip


@triton.jit
def _update(scores, v, acc, row_max, limit, sums, factor):
    """Online-softmax update that rescales only where a score exceeds `limit`."""
    is_above = (scores > limit[None, :]).to(tl.int32)
    if tl.max(tl.reshape(is_above, (TOKENS * MAX_ROWS,)), 0) > 0:
        new_max = tl.maximum(row_max, tl.max(scores, 0) * factor)
        rescale = tl.exp2(row_max - new_max)
        sums *= rescale[None, :]
        acc *= rescale[None, :]
        row_max = new_max
        limit = (row_max + RESCALE_MARGIN) / factor
    weights = tl.exp2(scores * factor - row_max[None, :])
    sums += weights
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc)
    return acc, row_max, limit, sums


@triton.jit
def _load_queries(q_ptr, count, HEAD_DIM: tl.constexpr):
    """[HEAD_DIM, MAX_ROWS]: the first `count` rows as columns, zeros behind them.

    In the MMA fragment layout, so that no data moves between threads. The axes: threads (4),
    threads (8), groups of 16 elements, their halves, two elements.
    """
    row = axis(MAX_ROWS, 1, 5)
    dim = axis(HEAD_DIM // 16, 2, 5) * 16 + axis(2, 3, 5) * 8
    dim += axis(4, 0, 5) * 2 + axis(2, 4, 5)
    q = tl.load(q_ptr + row * HEAD_DIM + dim, mask=row < count, other=0.0)
    q = tl.permute(q, (1, 2, 3, 0, 4))
    return tl.trans(tl.reshape(q, (MAX_ROWS, HEAD_DIM)))
