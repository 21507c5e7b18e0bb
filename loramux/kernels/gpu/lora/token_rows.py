"""LoRA of rows of many tokens, as image models have them, on a GPU: each row has its own adapters.

The matrices stay where the adapters were copied to, and a table has their addresses. A tile has
tokens of one row only, so that a row's deltas do not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4
"""The words of a module: address of A, address of B, rank, and address of the bias or 0."""
MAX_RANKS = 64
"""Ranks of one dot product; a larger rank is computed in several parts."""
MIN_RANKS = 16
ALIGN_BYTES = 16
# Tokens of a tile, and columns of the input or the output; the fastest of those tried on an H200.
_SHRINK_TOKENS, _SHRINK_COLUMNS = 32, 128
_EXPAND_TOKENS, _EXPAND_COLUMNS = 32, 256
_WIDE_EXPAND_TOKENS, _WIDE_EXPAND_COLUMNS = 64, 64
"""For ranks above 32."""


@dataclass(frozen=True, slots=True, eq=False)
class RowTerms:
    """The adapters of each row in one module."""

    places: Tensor
    """int64 [rows, terms, words]: addresses of A [rank, in] and B [out, rank], the rank, and the
    address of a bias [out], or 0."""
    weights: Tensor
    """float32 [rows, terms]"""
    max_rank: int
    """None is larger; at least 1 if a bias stands alone."""
    is_aligned: bool
    """Whether each row of all matrices begins at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class RowTokens:
    """The tokens of each row in inputs without a dimension of rows."""

    starts: Tensor
    """int32 [rows + 1]: the first token of each row."""
    most: int
    """The largest number of tokens of a row."""


def add_deltas(x: Tensor, y: Tensor, terms: RowTerms, tokens: RowTokens | None = None) -> None:
    """y[row] += weight * ((x[row] @ A.T) @ B.T + bias) for every term of every row.

    x [rows, tokens, in] or [rows, in], y likewise [.., out]; with `tokens` [all tokens, in].
    """
    num_rows, num_terms = terms.weights.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    if tokens is None:
        x, y = x.reshape(num_rows, -1, x.shape[-1]), y.view(num_rows, -1, y.shape[-1])
        most = x.shape[1]
        strides = (*x.stride()[:2], *y.stride()[:2])
    else:
        most = tokens.most
        strides = (0, x.stride(0), 0, y.stride(0))
    if terms.max_rank == 0 or most == 0:
        return
    ranks = min(max(triton.next_power_of_2(terms.max_rank), MIN_RANKS), MAX_RANKS)
    chunks = triton.cdiv(terms.max_rank, ranks)
    parts = num_terms * chunks
    h = x.new_empty(parts, num_rows, most, ranks)
    starts = terms.places if tokens is None else tokens.starts
    shared = {
        "RANKS": ranks,
        "HAS_STARTS": tokens is not None,
        "ALIGNED": terms.is_aligned,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    _shrink_kernel[triton.cdiv(most, _SHRINK_TOKENS), num_rows, parts](
        *(x, h, terms.places, starts),
        *(num_terms, chunks, most, x.shape[-1], *strides[:2]),
        **shared,
        TOKENS=_SHRINK_TOKENS,
        COLUMNS=_SHRINK_COLUMNS if x.itemsize < 4 else _SHRINK_COLUMNS // 2,
        num_warps=2,
        num_stages=4,
    )
    high, wide = (
        (_EXPAND_TOKENS, _EXPAND_COLUMNS)
        if ranks <= MAX_RANKS // 2
        else (_WIDE_EXPAND_TOKENS, _WIDE_EXPAND_COLUMNS)
    )
    grid = (triton.cdiv(y.shape[-1], wide), triton.cdiv(most, high), num_rows)
    _expand_kernel[grid](
        *(h, y, terms.places, terms.weights, starts),
        *(num_terms, chunks, most, y.shape[-1], *strides[2:]),
        **shared,
        TOKENS=high,
        COLUMNS=wide,
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _row_of(starts, row, most, HAS_STARTS: tl.constexpr):
    """First token of a row, counted from where its stride leads, and its number of tokens."""
    first = 0
    count = most
    if HAS_STARTS:
        first = tl.load(starts + row)
        count = tl.load(starts + row + 1) - first
    return first, count


@triton.jit
def _matrix(address, like, ALIGNED: tl.constexpr):
    matrix = address.to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
    return matrix


@triton.jit
def _stride(length, like, ALIGNED: tl.constexpr):
    if ALIGNED:
        length = tl.multiple_of(length, 128 // like.dtype.element_ty.primitive_bitwidth)
    return length


@triton.jit(do_not_specialize=["num_terms", "chunks", "most"])
def _shrink_kernel(  # noqa: PLR0913
    x, h, places, starts, num_terms, chunks, most, in_features, x_row, x_token,
    RANKS: tl.constexpr, HAS_STARTS: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """h[part, row] = x[row] @ A.T for RANKS ranks of one term of a row."""
    row = tl.program_id(1)
    part = tl.program_id(2)
    place = places + (row * num_terms + part // chunks) * 4
    first_rank = (part % chunks) * RANKS
    rank = tl.load(place + 2).to(tl.int32)
    first, count = _row_of(starts, row, most, HAS_STARTS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if (rank <= first_rank) | (tl.program_id(0) * TOKENS >= count):
        return
    a = _matrix(tl.load(place), x, ALIGNED)
    a_stride = _stride(in_features, x, ALIGNED)
    column = tl.arange(0, COLUMNS)
    ranks = first_rank + tl.arange(0, RANKS)
    x += row.to(tl.int64) * x_row
    x_rows = x + (first + token).to(tl.int64)[:, None] * x_token
    a_rows = a + ranks[None, :] * a_stride
    is_token, is_rank = (token < count)[:, None], (ranks < rank)[None, :]
    total = tl.zeros((TOKENS, RANKS), dtype=tl.float32)
    for start in range(0, in_features, COLUMNS):
        at = start + column
        values = tl.load(x_rows + at[None, :], mask=is_token & (at < in_features)[None, :], other=0)
        matrix = tl.load(a_rows + at[:, None], mask=is_rank & (at < in_features)[:, None], other=0)
        total = tl.dot(values, matrix, total, input_precision=PRECISION)
    target = (part * tl.num_programs(1) + row).to(tl.int64) * most + token
    out = h + target[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    tl.store(out, total.to(h.dtype.element_ty), mask=is_token)


@triton.jit(do_not_specialize=["num_terms", "chunks", "most"])
def _expand_kernel(  # noqa: PLR0913
    h, y, places, weights, starts, num_terms, chunks, most, out_features, y_row, y_token,
    RANKS: tl.constexpr, HAS_STARTS: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[row] += the sum over parts of weight * h[part, row] @ B.T, and weight * bias.

    Rows without a term stay as they are.
    """
    row = tl.program_id(2)
    first, count = _row_of(starts, row, most, HAS_STARTS)
    if tl.program_id(1) * TOKENS >= count:
        return
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANKS)
    is_token, is_column = (token < count)[:, None], column < out_features
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    num_live = 0
    for part in range(0, num_terms * chunks):
        term = row * num_terms + part // chunks
        first_rank = (part % chunks) * RANKS
        rank = tl.load(places + term * 4 + 2).to(tl.int32)
        if rank > first_rank:
            num_live += 1
            b = _matrix(tl.load(places + term * 4 + 1), y, ALIGNED) + first_rank
            source = (part * tl.num_programs(2) + row).to(tl.int64) * most + token
            left = tl.load(h + source[:, None] * RANKS + ranks[None, :], mask=is_token, other=0)
            right = tl.load(
                b + column[None, :] * _stride(rank, y, ALIGNED) + ranks[:, None],
                mask=is_column[None, :] & (first_rank + ranks < rank)[:, None],
                other=0,
            )
            total += tl.load(weights + term) * tl.dot(left, right, input_precision=PRECISION)
    for one in range(0, num_terms):
        address = tl.load(places + (row * num_terms + one) * 4 + 3)
        if address != 0:
            num_live += 1
            bias = tl.load(_matrix(address, y, False) + column, mask=is_column, other=0)
            total += tl.load(weights + row * num_terms + one) * bias.to(tl.float32)[None, :]
    if num_live > 0:
        y_rows = y + row.to(tl.int64) * y_row + (first + token).to(tl.int64)[:, None] * y_token
        inside = is_token & is_column[None, :]
        values = tl.load(y_rows + column[None, :], mask=inside, other=0).to(tl.float32)
        tl.store(y_rows + column[None, :], (values + total).to(y.dtype.element_ty), mask=inside)
