"""Gains, biases and embedding rows of each row's adapters: one program for a part of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.extras import tables as names
from loramux.kernels.gpu.extras.access import (
    ALIGN,
    MATRIX_WORDS,
    NUM_ROWS,
    TOKENS,
    VECTOR_WORDS,
    WIDTH,
    load_entry,
    load_row,
    row_offset,
)
from loramux.kernels.gpu.extras.tables import ExtrasTables
from loramux.kernels.gpu.pdl import pdl_options, pdl_wait_and_launch

_BLOCK = 2048
_EMBED_WEIGHT: tl.constexpr = tl.constexpr(names.EMBED_WEIGHT)
_EMBED_ROWS: tl.constexpr = tl.constexpr(names.EMBED_ROWS)
_EMBED_A: tl.constexpr = tl.constexpr(names.EMBED_A)
_EMBED_B: tl.constexpr = tl.constexpr(names.EMBED_B)
_HEAD_GAIN: tl.constexpr = tl.constexpr(names.HEAD_GAIN)
_HEAD_BIAS: tl.constexpr = tl.constexpr(names.HEAD_BIAS)


def scale_add(tables: ExtrasTables, y: Tensor, vector: int) -> None:
    """y = y * (1 + sum of weight * gain) + sum of weight * bias, in place. y [rows, out]"""
    num_rows, width = y.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _scale_add[(num_rows, triton.cdiv(width, block))](
        *(tables.pool, tables.vectors, tables.words, y),
        *(y.stride(0), width, vector, tables.vectors.stride(0), tables.limits.entries_at),
        BLOCK=block,
        num_warps=4,
        **pdl_options(y.device.type),
    )


def scale_logits(tables: ExtrasTables, logits: Tensor) -> None:
    """`scale_add` of the head, whose gains and biases lie in pages. logits [rows, columns]"""
    num_rows, width = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _scale_logits[(num_rows, triton.cdiv(width, block))](
        *(tables.pool, tables.matrices, tables.heap, tables.words, logits),
        *(logits.stride(0), width, tables.model_matrices),
        *(tables.matrices.stride(0), tables.limits.entries_at),
        BLOCK=block,
        PAGE=tables.pool.shape[1],
        num_warps=4,
        **pdl_options(logits.device.type),
    )


def embed_rows(tables: ExtrasTables, y: Tensor, token_ids: Tensor, scale: float) -> None:
    """Replace the embedding of each row, or adds low rank to it, times the model's scale.

    y [rows, hidden]   token_ids [rows]
    """
    num_rows, width = y.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _embed_rows[(num_rows, triton.cdiv(width, block))](
        *(tables.pool, tables.matrices, tables.heap, tables.words, y, token_ids),
        *(float(scale), tables.model_matrices),
        *(tables.matrices.stride(0), tables.limits.entries_at),
        SIZE=width,
        BLOCK=block,
        PAGE=tables.pool.shape[1],
        num_warps=4,
        **pdl_options(y.device.type),
    )


@triton.jit
def _load_vector(pool, address, column, width):
    at = pool + address.to(tl.int64) * ALIGN + column
    inside = column < tl.where(address >= 0, width, 0)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["vector", "slot_stride", "entries_at"])
def _scale_add(
    pool, vectors, words, y, y_stride, width, vector, slot_stride, entries_at,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    pdl_wait_and_launch(PDL)
    first, stop = load_row(words, row)
    if first < stop:
        gain = tl.zeros((BLOCK,), tl.float32)
        bias = tl.zeros((BLOCK,), tl.float32)
        for index in range(first, stop):
            slot, weight = load_entry(words, entries_at, index)
            at = vectors + slot * slot_stride + vector * VECTOR_WORDS
            gain += weight * _load_vector(pool, tl.load(at), column, width)
            bias += weight * _load_vector(pool, tl.load(at + 1), column, width)
        target = y + row.to(tl.int64) * y_stride + column
        value = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        value = value + gain * value + bias
        tl.store(target, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load_column(pool, heap, matrix, column, inside, PAGE: tl.constexpr):
    """Elements of a matrix of one column, 0 where it has none."""
    inside = inside & (column < tl.load(matrix + NUM_ROWS))
    at = row_offset(heap, matrix, tl.where(inside, column, 0), 1, PAGE)
    return tl.load(pool + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["model", "slot_stride", "entries_at"])
def _scale_logits(
    pool, matrices, heap, words, logits, stride, width, model, slot_stride, entries_at,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    pdl_wait_and_launch(PDL)
    first, stop = load_row(words, row)
    num_vectors = 0
    for index in range(first, stop):
        slot, _ = load_entry(words, entries_at, index)
        matrix = matrices + slot * slot_stride + model * MATRIX_WORDS + NUM_ROWS
        num_vectors += tl.load(matrix + _HEAD_GAIN * MATRIX_WORDS)
        num_vectors += tl.load(matrix + _HEAD_BIAS * MATRIX_WORDS)
    if num_vectors > 0:
        gain = tl.zeros((BLOCK,), tl.float32)
        bias = tl.zeros((BLOCK,), tl.float32)
        for index in range(first, stop):
            slot, weight = load_entry(words, entries_at, index)
            matrix = matrices + slot * slot_stride + model * MATRIX_WORDS
            at = matrix + _HEAD_GAIN * MATRIX_WORDS
            gain += weight * _load_column(pool, heap, at, column, inside, PAGE)
            at = matrix + _HEAD_BIAS * MATRIX_WORDS
            bias += weight * _load_column(pool, heap, at, column, inside, PAGE)
        target = logits + row.to(tl.int64) * stride + column
        value = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        # Columns of other vocabularies stay -inf: 0 * -inf would be NaN.
        inside = inside & (value > float("-inf"))
        value = value * (1.0 + gain) + bias
        tl.store(target, value.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _find_token(heap, start, count, token):
    """Return the position of a token among `count` ascending ones; -1: it is none of them."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(heap + start + middle) < token
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    found = tl.load(heap + start + low, mask=low < count, other=-1)
    return tl.where(found == token, low, -1)


@triton.jit
def _replaced(
    value, pool, heap, matrix, row, is_live, scale, column, SIZE: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """scale * a row of a matrix, rounded, if `is_live`; else `value`."""
    width = tl.load(matrix + WIDTH)
    at = row_offset(heap, matrix, tl.where(is_live, row, 0), width, PAGE)
    inside = column < tl.where(is_live, SIZE, 0)
    own = tl.load(pool + at + column, mask=inside, other=0.0)
    rounded = (own.to(tl.float32) * scale).to(own.dtype).to(tl.float32)
    return tl.where(is_live, rounded, value)


@triton.jit(do_not_specialize=["scale", "model", "slot_stride", "entries_at"])
def _embed_rows(
    pool, matrices, heap, words, residual, token_ids, scale, model, slot_stride, entries_at,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    pdl_wait_and_launch(PDL)
    first, stop = load_row(words, row)
    if first < stop:
        token = tl.load(token_ids + row).to(tl.int32)
        target = residual + row.to(tl.int64) * SIZE + column
        value = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        for index in range(first, stop):
            slot, weight = load_entry(words, entries_at, index)
            matrix = matrices + slot * slot_stride + model * MATRIX_WORDS
            at = matrix + _EMBED_WEIGHT * MATRIX_WORDS
            is_live = token < tl.load(at + NUM_ROWS)
            value = _replaced(value, pool, heap, at, token, is_live, scale, column, SIZE, PAGE)
            at = matrix + _EMBED_ROWS * MATRIX_WORDS
            found = _find_token(heap, tl.load(at + TOKENS), tl.load(at + NUM_ROWS), token)
            value = _replaced(value, pool, heap, at, found, found >= 0, scale, column, SIZE, PAGE)
            at = matrix + _EMBED_A * MATRIX_WORDS
            if token < tl.load(at + NUM_ROWS):
                rank = tl.load(at + WIDTH)
                a = pool + row_offset(heap, at, token, rank, PAGE)
                added = tl.zeros((BLOCK,), tl.float32)
                for number in range(rank):
                    b = row_offset(heap, matrix + _EMBED_B * MATRIX_WORDS, number, SIZE, PAGE)
                    factor = tl.load(a + number).to(tl.float32)
                    line = tl.load(pool + b + column, mask=inside, other=0.0)
                    added += factor * line.to(tl.float32)
                value += scale * weight * added
        tl.store(target, value.to(residual.dtype.element_ty), mask=inside)
