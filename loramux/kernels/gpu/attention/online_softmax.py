"""What the attention kernel does with a tile of tokens: the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.pdl import axis

LOG2_E = tl.constexpr(1.4426950408889634)
# Weights may grow to 2 to this before sums are scaled anew: float16 has room for it.
ROOM = tl.constexpr(8.0)


@triton.jit
def load_ordered_q(q_ptr, count, q_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """[16, HEAD_DIM]: the first `count` rows, each GROUP heads of a token; zeros behind them.

    As lanes hand it to a matrix unit (two numbers of a row each), so that it stays with them. The
    axes: lanes (4), lanes (8), halves of the rows, groups of 16 numbers, their halves, two numbers.
    """
    row = axis(8, 1, 6) + 8 * axis(2, 2, 6)
    dim = axis(HEAD_DIM // 16, 3, 6) * 16 + axis(2, 4, 6) * 8
    dim += axis(4, 0, 6) * 2 + axis(2, 5, 6)
    at = row // GROUP * q_stride + row % GROUP * HEAD_DIM + dim
    q = tl.load(q_ptr + at, mask=row < count, other=0.0)
    q = tl.permute(q, (2, 1, 3, 4, 0, 5))
    return tl.reshape(q, (16, HEAD_DIM))


@triton.jit
def fold_seen(  # noqa: PLR0913
    q,
    acc,
    best,
    sums,
    keys_ptr,
    pages_ptr,
    page_stride,
    start,
    end,
    scale,
    softcap,
    token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As fold, where every row sees every token. sums [ROWS, TOKENS]: not yet added up.

    A decode step reads as fast as the card allows, and draws as much power as it may: what is not
    computed here makes the products faster. So nothing is scaled anew until a score is 2 to the
    ROOM above the best: mostly that is the first one.
    """
    k, v = load_tile(
        keys_ptr, pages_ptr, page_stride, start, end, token_stride, HEAD_DIM, BLOCK_TOKENS,
        True, TOKENS, DIM,
    )  # fmt: skip
    scores, factor = _scores(
        q, k, start, end, start, scale, softcap, 0, HAS_SOFTCAP, False, True, TOKENS, PRECISION
    )
    highest = scores
    if TILES == 2:
        next_k, next_v = load_tile(
            keys_ptr, pages_ptr, page_stride, start + TOKENS, end, token_stride, HEAD_DIM,
            BLOCK_TOKENS, True, TOKENS, DIM,
        )  # fmt: skip
        next_scores, factor = _scores(
            q, next_k, start + TOKENS, end, start, scale, softcap, 0, HAS_SOFTCAP, False, True,
            TOKENS, PRECISION,
        )  # fmt: skip
        highest = tl.maximum(scores, next_scores)
    highest = tl.max(highest, 1) * factor
    if tl.max((highest > best + ROOM).to(tl.int32), 0) > 0:
        new_best = tl.maximum(best, highest)
        fade = tl.exp2(best - new_best)
        sums *= fade[:, None]
        acc *= fade[:, None]
        best = new_best
    weights = tl.exp2(scores * factor - best[:, None])
    sums += weights
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    if TILES == 2:
        weights = tl.exp2(next_scores * factor - best[:, None])
        sums += weights
        acc = tl.dot(weights.to(v.dtype), next_v, acc, input_precision=PRECISION)
    return acc, best, sums


@triton.jit
def fold(  # noqa: PLR0913
    q,
    acc,
    best,
    total,
    keys_ptr,
    pages_ptr,
    page_stride,
    start,
    end,
    positions,
    scale,
    softcap,
    token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the running softmax, over one or two tiles of tokens from `start` on."""
    k, v = load_tile(
        keys_ptr, pages_ptr, page_stride, start, end, token_stride, HEAD_DIM, BLOCK_TOKENS,
        MASKED, TOKENS, DIM,
    )  # fmt: skip
    scores, factor = _scores(
        q, k, start, end, positions, scale, softcap, WINDOW, HAS_SOFTCAP, CAUSAL, MASKED,
        TOKENS, PRECISION,
    )  # fmt: skip
    highest = tl.max(scores, 1)
    if TILES == 2:
        next_k, next_v = load_tile(
            keys_ptr, pages_ptr, page_stride, start + TOKENS, end, token_stride, HEAD_DIM,
            BLOCK_TOKENS, MASKED, TOKENS, DIM,
        )  # fmt: skip
        next_scores, factor = _scores(
            q, next_k, start + TOKENS, end, positions, scale, softcap, WINDOW, HAS_SOFTCAP,
            CAUSAL, MASKED, TOKENS, PRECISION,
        )  # fmt: skip
        highest = tl.maximum(highest, tl.max(next_scores, 1))
    new_best = tl.maximum(best, highest * factor)
    shift = new_best
    if MASKED and (CAUSAL or WINDOW > 0):
        # A row may have seen nothing yet.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    if TILES == 2:
        weights = tl.exp2(next_scores * factor - shift[:, None])
        total += tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), next_v, acc, input_precision=PRECISION)
    return acc, new_best, total


@triton.jit
def load_tile(  # noqa: PLR0913
    keys_ptr,
    pages_ptr,
    page_stride,
    start,
    end,
    token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Keys and values [TOKENS, DIM]; keys past the end are any finite or other numbers."""
    offset = tl.arange(0, TOKENS)
    dim = tl.arange(0, DIM)
    inside = (start + offset < end)[:, None]
    if BLOCK_TOKENS % TOKENS == 0:
        # A tile within one page: its address is one number.
        first = tl.minimum(start, end - 1)
        page = tl.load(pages_ptr + first // BLOCK_TOKENS)
        keys_ptr += page.to(tl.int64) * page_stride + first % BLOCK_TOKENS * token_stride
        if MASKED:
            # Past the end, the last token again: it weighs nothing, and is a number.
            offset = tl.minimum(offset, end - 1 - first)
            inside = (offset >= 0)[:, None]
        at = offset * token_stride
    else:
        pages = tl.load(pages_ptr + tl.minimum(start + offset, end - 1) // BLOCK_TOKENS)
        at = pages.to(tl.int64) * page_stride
        at += (start + offset) % BLOCK_TOKENS * token_stride
    at = at[:, None] + dim[None, :]
    values_ptr = keys_ptr + BLOCK_TOKENS * token_stride
    if HEAD_DIM != DIM:
        in_head = (dim < HEAD_DIM)[None, :]
        k = tl.load(keys_ptr + at, mask=in_head, other=0.0)
        v = tl.load(values_ptr + at, mask=in_head & inside, other=0.0)
    elif MASKED and BLOCK_TOKENS % TOKENS != 0:
        k = tl.load(keys_ptr + at)
        # What lies past the end may be no number, and 0 times that is none either.
        v = tl.load(values_ptr + at, mask=inside, other=0.0)
    else:
        k = tl.load(keys_ptr + at)
        v = tl.load(values_ptr + at)
    return k, v


@triton.jit
def _scores(  # noqa: PLR0913
    q,
    k,
    start,
    end,
    positions,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q k^T, and the factor that makes it exponents of 2."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        scores = capped(scores, scale, softcap)
        factor = LOG2_E
    if MASKED:
        token = start + tl.arange(0, TOKENS)
        seen = (token < end)[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores, factor


@triton.jit
def capped(scores, scale, softcap):
    """softcap * tanh(scores * scale / softcap)"""
    return (2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0) * softcap
