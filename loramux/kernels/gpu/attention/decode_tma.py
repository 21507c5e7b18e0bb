"""Decode attention on a device whose units copy tiles by a descriptor, beside what it computes.

A step of many rows draws as much power as the card may, so what is saved here makes its products
faster. Rows of q are the second operand of the products: there are eight of them where there would
be sixteen, and half as many products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.attention.kernel import leave_item, load_item
from loramux.kernels.gpu.attention.online_softmax import LOG2_E, ROOM, capped
from loramux.kernels.gpu.pdl import axis, pdl_wait_and_launch

TOKENS: tl.constexpr = tl.constexpr(16)
"""Of a tile, which is a whole page of one layer."""
MOST_ROWS: tl.constexpr = tl.constexpr(8)
"""Query heads that share a kv head."""


@triton.jit(do_not_specialize=["layer_tile"])
def attend_decodes(  # noqa: PLR0913
    q_ptr,
    tiles,
    out_ptr,
    items_ptr,
    page_table_ptr,
    partial_ptr,
    log_sum_ptr,
    arrivals_ptr,
    q_stride,
    page_tiles,
    page_table_stride,
    layer_tile,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """As attend_items, for items of one row that sees all of their tokens.

    tiles: a descriptor of [keys or values of a page's layer, TOKENS, KV_HEADS * HEAD_DIM], of which
    it copies one head   page_tiles: of a page, two for each layer
    """
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence, first_row, num_rows, _, begin, end, num_items, first_item = load_item(items_ptr, item)
    pages_ptr = page_table_ptr + sequence.to(tl.int64) * page_table_stride + begin // TOKENS
    pdl_wait_and_launch(PDL)
    if num_rows == 0:
        return

    q_ptr += first_row.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
    q = _load_queries(q_ptr, num_rows * GROUP, HEAD_DIM)
    # No score is above that of a row which is none: its weights are zero.
    best = tl.where(tl.arange(0, MOST_ROWS) < num_rows * GROUP, float("-inf"), 1e30)
    limit = best
    acc = tl.zeros([HEAD_DIM, MOST_ROWS], tl.float32)
    sums = tl.zeros([TOKENS, MOST_ROWS], tl.float32)
    factor = LOG2_E if HAS_SOFTCAP else scale * LOG2_E
    token = tl.arange(0, TOKENS)
    for number in tl.range(0, tl.cdiv(end - begin, TOKENS)):
        tile = tl.load(pages_ptr + number) * page_tiles + layer_tile
        # Tokens past the end are not copied: the last tile begins ahead of its page, with zeros.
        ahead = tl.minimum(end - begin - number * TOKENS, TOKENS) - TOKENS
        k = tl.reshape(tiles.load([tile, ahead, kv_head * HEAD_DIM]), (TOKENS, HEAD_DIM))
        v = tl.reshape(tiles.load([tile + 1, ahead, kv_head * HEAD_DIM]), (TOKENS, HEAD_DIM))
        scores = tl.dot(k, q)
        if HAS_SOFTCAP:
            scores = capped(scores, scale, softcap)
        scores = tl.where((token + ahead >= 0)[:, None], scores, float("-inf"))
        is_above = (scores > limit[None, :]).to(tl.int32)
        if tl.max(tl.reshape(is_above, (TOKENS * MOST_ROWS,)), 0) > 0:
            new_best = tl.maximum(best, tl.max(scores, 0) * factor)
            fade = tl.exp2(best - new_best)
            sums *= fade[None, :]
            acc *= fade[None, :]
            best = new_best
            limit = (best + ROOM) / factor
        weights = tl.exp2(scores * factor - best[None, :])
        sums += weights
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc)
    leave_item(
        tl.trans(acc), best, tl.sum(sums, 0), item, kv_head, first_row, num_rows, num_items,
        first_item, out_ptr, partial_ptr, log_sum_ptr, arrivals_ptr, KV_HEADS, GROUP, HEAD_DIM,
        ROWS, HEAD_DIM, MERGED,
    )  # fmt: skip


@triton.jit
def _load_queries(q_ptr, count, HEAD_DIM: tl.constexpr):
    """[HEAD_DIM, MOST_ROWS]: the first `count` rows as columns, zeros behind them.

    As lanes hand it to a matrix unit, so that it stays with them. The axes: lanes (4), lanes (8),
    groups of 16 numbers, their halves, two numbers.
    """
    row = axis(MOST_ROWS, 1, 5)
    dim = axis(HEAD_DIM // 16, 2, 5) * 16 + axis(2, 3, 5) * 8
    dim += axis(4, 0, 5) * 2 + axis(2, 4, 5)
    q = tl.load(q_ptr + row * HEAD_DIM + dim, mask=row < count, other=0.0)
    q = tl.permute(q, (1, 2, 3, 0, 4))
    return tl.trans(tl.reshape(q, (MOST_ROWS, HEAD_DIM)))
