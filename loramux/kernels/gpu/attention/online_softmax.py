"""Online-softmax update of attention over one or two tiles of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.pdl import axis

LOG2_E = tl.constexpr(1.4426950408889634)
# Weights may grow to 2 to this power before sums are rescaled: float16 can represent it.
RESCALE_MARGIN = tl.constexpr(8.0)


@triton.jit
def load_q_fragment(q_ptr, count, q_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """[16, HEAD_DIM]: the first `count` rows, each GROUP heads of a token; zeros behind them.

    In the MMA fragment layout, so that no data moves between threads. The axes: threads (4),
    threads (8), halves of the rows, groups of 16 elements, their halves, two elements.
    """
    row = axis(8, 1, 6) + 8 * axis(2, 2, 6)
    dim = axis(HEAD_DIM // 16, 3, 6) * 16 + axis(2, 4, 6) * 8
    dim += axis(4, 0, 6) * 2 + axis(2, 5, 6)
    at = row // GROUP * q_stride + row % GROUP * HEAD_DIM + dim
    q = tl.load(q_ptr + at, mask=row < count, other=0.0)
    q = tl.permute(q, (2, 1, 3, 4, 0, 5))
    return tl.reshape(q, (16, HEAD_DIM))


@triton.jit
def update_unmasked(  # noqa: PLR0913
    q,
    acc,
    row_max,
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
    """`update` where every row sees every token. sums [ROWS, TOKENS]: not reduced over tokens yet

    Decode steps are power-limited, so work that is saved here speeds up the GEMMs: sums are only
    rescaled when a score exceeds the maximum by 2 ** RESCALE_MARGIN, mostly at the first tile.
    """
    k, v = load_tile(
        keys_ptr, pages_ptr, page_stride, start, end, token_stride, HEAD_DIM, BLOCK_TOKENS,
        True, TOKENS, DIM,
    )  # fmt: skip
    scores, factor = _scores(
        q, k, start, end, start, scale, softcap, 0, HAS_SOFTCAP, False, True, TOKENS, PRECISION
    )
    tile_max = scores
    if TILES == 2:
        next_k, next_v = load_tile(
            keys_ptr, pages_ptr, page_stride, start + TOKENS, end, token_stride, HEAD_DIM,
            BLOCK_TOKENS, True, TOKENS, DIM,
        )  # fmt: skip
        next_scores, factor = _scores(
            q, next_k, start + TOKENS, end, start, scale, softcap, 0, HAS_SOFTCAP, False, True,
            TOKENS, PRECISION,
        )  # fmt: skip
        tile_max = tl.maximum(scores, next_scores)
    tile_max = tl.max(tile_max, 1) * factor
    if tl.max((tile_max > row_max + RESCALE_MARGIN).to(tl.int32), 0) > 0:
        new_max = tl.maximum(row_max, tile_max)
        rescale = tl.exp2(row_max - new_max)
        sums *= rescale[:, None]
        acc *= rescale[:, None]
        row_max = new_max
    weights = tl.exp2(scores * factor - row_max[:, None])
    sums += weights
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    if TILES == 2:
        weights = tl.exp2(next_scores * factor - row_max[:, None])
        sums += weights
        acc = tl.dot(weights.to(q.dtype), next_v.to(q.dtype), acc, input_precision=PRECISION)
    return acc, row_max, sums


@triton.jit
def update(  # noqa: PLR0913
    q,
    acc,
    row_max,
    row_sum,
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
    """Online-softmax update over one or two tiles of tokens from `start` on, with masks."""
    k, v = load_tile(
        keys_ptr, pages_ptr, page_stride, start, end, token_stride, HEAD_DIM, BLOCK_TOKENS,
        MASKED, TOKENS, DIM,
    )  # fmt: skip
    scores, factor = _scores(
        q, k, start, end, positions, scale, softcap, WINDOW, HAS_SOFTCAP, CAUSAL, MASKED,
        TOKENS, PRECISION,
    )  # fmt: skip
    tile_max = tl.max(scores, 1)
    if TILES == 2:
        next_k, next_v = load_tile(
            keys_ptr, pages_ptr, page_stride, start + TOKENS, end, token_stride, HEAD_DIM,
            BLOCK_TOKENS, MASKED, TOKENS, DIM,
        )  # fmt: skip
        next_scores, factor = _scores(
            q, next_k, start + TOKENS, end, positions, scale, softcap, WINDOW, HAS_SOFTCAP,
            CAUSAL, MASKED, TOKENS, PRECISION,
        )  # fmt: skip
        tile_max = tl.maximum(tile_max, tl.max(next_scores, 1))
    new_max = tl.maximum(row_max, tile_max * factor)
    shift = new_max
    if MASKED and (CAUSAL or WINDOW > 0):
        # A row may not have seen any token yet.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * factor - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    if TILES == 2:
        weights = tl.exp2(next_scores * factor - shift[:, None])
        row_sum += tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), next_v.to(q.dtype), acc, input_precision=PRECISION)
    return acc, new_max, row_sum


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
    """Keys and values [TOKENS, DIM]; keys past the end are arbitrary, values there are finite."""
    offset = tl.arange(0, TOKENS)
    dim = tl.arange(0, DIM)
    inside = (start + offset < end)[:, None]
    if BLOCK_TOKENS % TOKENS == 0:
        # The tile lies within one page: one address.
        first = tl.minimum(start, end - 1)
        page = tl.load(pages_ptr + first // BLOCK_TOKENS)
        keys_ptr += page.to(tl.int64) * page_stride + first % BLOCK_TOKENS * token_stride
        if MASKED:
            # Tokens past the end clamp to the last one, which is finite; their weight is zero.
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
        # Unwritten KV may be NaN, and 0 * NaN is NaN.
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
    """q k^T, and the factor that turns it into exponents of 2."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        scores = apply_softcap(scores, scale, softcap)
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
def apply_softcap(scores, scale, softcap):
    """softcap * tanh(scores * scale / softcap)"""
    return (2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0) * softcap
