"""Compiled attention (float32): decodes read KV in their pages; long prefill chunks use SDPA.

KV of another dtype is converted by SDPA's gathers: the compiled loops read float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import float32, get_num_threads, njit, prange
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.cpu import attention as attention_cpu
from loramux.kernels.cpu_jit.attention_tiles import (
    MIX_WIDTH,
    TOKENS,
    heads_at,
    largest,
    mix_tile,
    score_tile,
)
from loramux.kernels.cpu_jit.runtime import LONG_BYTES, OPTIONS, exp, floats_at, longs_at, take_next
from loramux.kernels.cpu_jit.tiles import FLOAT_BYTES, LINE_BYTES
from loramux.kernels.ops import (
    AttendArgs,
    Rows,
    SequenceRows,
    empty_rows,
    kv_slots,
)
from loramux.types.kv import KVLayout

# A chunk of several rows that sees more tokens than this is cheaper as GEMMs.
_MAX_TOKENS_BY_ROW = 128
# Columns of the table of rows that the loops below read.
_ROW_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    layout: KVLayout
    slots: Tensor
    """[rows] int32: page * block_tokens + token."""
    rows: NDArray[np.int64]
    """[n, 3], rows of the compiled loop: row, its line of page_table, tokens it sees."""
    page_table: NDArray[np.int64]
    shared: attention_cpu.Plan | None
    """The chunks that attend as GEMMs; None: there is none."""
    num_threads: int

    def write_kv(self, storage: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's keys and values in their pages."""
        layout = self.layout
        shape = (layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        pages = storage.view(-1, *shape)
        slots = self.slots.long()
        page, token = slots // layout.block_tokens, slots % layout.block_tokens
        pages[page, layer, 0, token] = k.to(pages.dtype)
        pages[page, layer, 1, token] = v.to(pages.dtype)

    def attend(self, storage: Tensor, q: Tensor, args: AttendArgs) -> Tensor:
        """Row i attends to its own sequence's tokens up to itself: softmax(q K^T * scale) V."""
        out = empty_rows(q.shape[0], q.shape[1] * q.shape[2])
        self.attend_into(out, storage, q, args)
        return out.tensor

    def attend_into(self, out: Rows, storage: Tensor, q: Tensor, args: AttendArgs) -> None:
        layout = self.layout
        if self.shared is not None:
            self.shared.attend_into(out.tensor, storage, q, args)
        if not len(self.rows):
            return
        # With few rows, each KV head is a piece of its own, so that all threads have work.
        is_few = len(self.rows) < 2 * self.num_threads
        num_tokens = self.page_table.shape[1] * layout.block_tokens + TOKENS
        scores = np.empty((self.num_threads, q.shape[1] * num_tokens), dtype=np.float32)
        _attend_rows(
            (storage.data_ptr(), q.data_ptr(), out.tensor.data_ptr()),
            (storage.stride(0), q.stride(0), out.tensor.stride(0)),
            (self.page_table, self.rows),
            scores,
            np.zeros(1, dtype=np.int64),
            (layout.num_kv_heads, q.shape[1] // layout.num_kv_heads, layout.head_dim),
            (layout.block_tokens, args.layer, args.sliding_window or 0),
            layout.num_kv_heads if is_few else 1,
            (args.scale, args.softcap or 0.0),
        )


def plan(sequences: Sequence[SequenceRows], layout: KVLayout, device: torch.device) -> Plan:
    block = layout.block_tokens
    alone, others = [], list(sequences)
    if layout.dtype == "float32":
        alone = [s for s in sequences if s.num_rows == 1 or s.num_tokens <= _MAX_TOKENS_BY_ROW]
        others = [s for s in sequences if s.num_rows > 1 and s.num_tokens > _MAX_TOKENS_BY_ROW]
    rows = [
        (s.row_start + i, line, s.position_start + i + 1)
        for line, s in enumerate(alone)
        for i in range(s.num_rows)
    ]
    num_pages = [-(-s.num_tokens // block) for s in alone]
    page_table = np.zeros((len(alone), max(num_pages, default=0)), dtype=np.int64)
    for line, (sequence, count) in enumerate(zip(alone, num_pages, strict=True)):
        page_table[line, :count] = sequence.page_ids[:count]
    return Plan(
        layout=layout,
        slots=torch.tensor(kv_slots(sequences, block), dtype=torch.int32),
        rows=np.array(rows, dtype=np.int64).reshape(-1, _ROW_FIELDS),
        page_table=page_table,
        shared=attention_cpu.plan(others, layout, device) if others else None,
        num_threads=get_num_threads(),
    )


@njit("void(UniTuple(int64, 5), UniTuple(int64, 4), UniTuple(int64, 3))", **OPTIONS)
def _score(places, heads, size):
    """scores[h, t] = q[h] . keys[t, h // repeat], and of up to TOKENS - 1 tokens behind them.

    What lies behind a page's keys are its values: at least so many, or there are no tiles.
    """
    q, keys, scores, row_bytes, ahead = places
    first, stop, repeat, width = heads
    dim, count, block = size
    stride, head_bytes = width * FLOAT_BYTES, dim * FLOAT_BYTES
    is_tiled = dim % MIX_WIDTH == 0 and block >= TOKENS - 1
    for t in range(0, count if is_tiled else 0, TOKENS):
        for head in range(first, stop):
            source, target = keys + t * stride + head * head_bytes, scores + t * FLOAT_BYTES
            fetched = ahead + t * stride + head * TOKENS * head_bytes
            h, end = head * repeat, (head + 1) * repeat
            while h < end:
                query, row = q + h * head_bytes, target + (h - first * repeat) * row_bytes
                tile = (query, source, stride, dim, row, row_bytes, fetched)
                score_tile(heads_at(h, end), tile)
                h += heads_at(h, end)
    for t in range(0 if is_tiled else count):
        for h in range(first * repeat, stop * repeat):
            query = floats_at(q + h * head_bytes, dim)
            key = floats_at(keys + t * stride + h // repeat * head_bytes, dim)
            total = float32(0.0)
            for d in range(dim):
                total += query[d] * key[d]
            floats_at(scores + (h - first * repeat) * row_bytes, count)[t] = total


@njit("void(int64, int64, float32, float32)", **OPTIONS)
def _softmax(start, count, scale, softcap):
    scores = floats_at(start, count)
    if softcap > 0:
        for t in range(count):
            scores[t] = softcap * np.tanh(scores[t] * scale / softcap)
        scale = float32(1.0)
    best, total = largest(start, count), float32(0.0)
    for t in range(count):
        scores[t] = exp((scores[t] - best) * scale)
        total += scores[t]
    factor = float32(1.0) / total
    for t in range(count):
        scores[t] *= factor


@njit("void(UniTuple(int64, 5), UniTuple(int64, 4), int64, int64)", **OPTIONS)
def _mix(places, heads, dim, count):
    """sums[h] += scores[h, t] * values[t, h // repeat]"""
    values, scores, row_bytes, sums, ahead = places
    first, stop, repeat, width = heads
    stride, head_bytes = width * FLOAT_BYTES, dim * FLOAT_BYTES
    tiled = dim if dim % MIX_WIDTH == 0 else 0
    for head in range(stop - first):
        h, end = head * repeat, (head + 1) * repeat
        while h < end and tiled:
            row, target = scores + h * row_bytes, sums + h * head_bytes
            for d in range(0, tiled * FLOAT_BYTES, MIX_WIDTH * FLOAT_BYTES):
                value = values + (first + head) * head_bytes + d
                tile = (row, row_bytes, value, stride, count, target + d, head_bytes, ahead)
                mix_tile(heads_at(h, end), tile)
                ahead += count * LINE_BYTES
            h += heads_at(h, end)
    for t in range(0 if tiled else count):
        for h in range((stop - first) * repeat):
            into = floats_at(sums + h * head_bytes, dim)
            value = floats_at(values + t * stride + (first + h // repeat) * head_bytes, dim)
            factor = floats_at(scores + h * row_bytes, count)[t]
            for d in range(dim):
                into[d] += factor * value[d]


@njit(
    "void(UniTuple(int64, 6), UniTuple(int64, 4), UniTuple(int64, 3), UniTuple(int64, 3),"
    "UniTuple(float32, 2))",
    **OPTIONS,
)
def _attend_row(places, heads, sizes, seen, scaling):
    """places: q, out, scores, storage, the row's pages, the next row's.

    While a page's keys are read, its values are fetched; with these, the keys of the next row.
    """
    q, out, scores, storage, pages, next_pages = places
    first, stop_head, repeat, width = heads
    page_bytes, block, dim = sizes
    start, stop, num_next = seen
    token_bytes, keys_bytes = width * FLOAT_BYTES, block * width * FLOAT_BYTES
    num_heads, row_bytes = (stop_head - first) * repeat, (stop - start + TOKENS) * FLOAT_BYTES
    numbers = longs_at(pages, (stop + block - 1) // block)
    for number in range(start // block, numbers.size):
        begin, end = max(start, number * block), min(stop, (number + 1) * block)
        keys = storage + numbers[number] * page_bytes + begin % block * token_bytes
        target = scores + (begin - start) * FLOAT_BYTES
        matrices = (q, keys, target, row_bytes, keys + keys_bytes)
        _score(matrices, heads, (dim, end - begin, block))
    for head in range(num_heads):
        _softmax(scores + head * row_bytes, stop - start, scaling[0], scaling[1])
    sums = out + first * repeat * dim * FLOAT_BYTES
    floats_at(sums, num_heads * dim)[:] = float32(0.0)
    next_numbers = longs_at(next_pages, num_next)
    for number in range(start // block, numbers.size):
        begin, end = max(start, number * block), min(stop, (number + 1) * block)
        ahead = storage + next_numbers[min(number, num_next - 1)] * page_bytes
        values = storage + numbers[number] * page_bytes + begin % block * token_bytes + keys_bytes
        source = scores + (begin - start) * FLOAT_BYTES
        _mix((values, source, row_bytes, sums, ahead), heads, dim, end - begin)


@njit(
    "void(UniTuple(int64, 6), UniTuple(int64, 5), UniTuple(int64, 2), UniTuple(int64, 3),"
    "UniTuple(int64, 3), UniTuple(float32, 2))",
    **OPTIONS,
)
def _take_rows(places, strides, size, shape, place, scaling):
    """Let a free thread take the next row, or the next part of its heads."""
    storage, q, out, page_table, rows, counter = places
    page_bytes, q_bytes, out_bytes, line_bytes, scores = strides
    num_rows, num_parts = size
    num_kv_heads, repeat, dim = shape
    block, layer, window = place
    width, heads_each = num_kv_heads * dim, num_kv_heads // num_parts
    storage += layer * 2 * block * width * FLOAT_BYTES
    item, last = take_next(counter), num_rows * num_parts - 1
    while item <= last:
        following = take_next(counter)
        row = longs_at(rows + item // num_parts * _ROW_FIELDS * LONG_BYTES, _ROW_FIELDS)
        other = min(following, last) // num_parts * _ROW_FIELDS * LONG_BYTES
        next_row = longs_at(rows + other, _ROW_FIELDS)
        pages, next_pages = page_table + row[1] * line_bytes, page_table + next_row[1] * line_bytes
        start = max(0, row[2] - window) if window > 0 else 0
        first = item % num_parts * heads_each
        _attend_row(
            (q + row[0] * q_bytes, out + row[0] * out_bytes, scores, storage, pages, next_pages),
            (first, first + heads_each, repeat, width),
            (page_bytes, block, dim),
            (start, row[2], (next_row[2] + block - 1) // block),
            scaling,
        )
        item = following


@njit(
    "void(UniTuple(int64, 3), UniTuple(int64, 3), UniTuple(int64[:, ::1], 2), float32[:, ::1],"
    "int64[::1], UniTuple(int64, 3), UniTuple(int64, 3), int64, UniTuple(float32, 2))",
    parallel=True,
    **OPTIONS,
)
def _attend_rows(arrays, strides, tables, scores, taken, heads, place, num_parts, scaling):
    """Pass addresses to the threads: reference counts of a shared array would be contended.

    scores: scratch of each thread; taken: zero
    """
    page_table, rows = tables
    places = (*arrays, page_table.ctypes.data, rows.ctypes.data, taken.ctypes.data)
    line_bytes, scratch = page_table.shape[1] * LONG_BYTES, scores.ctypes.data
    distances = strides[0] * FLOAT_BYTES, strides[1] * FLOAT_BYTES, strides[2] * FLOAT_BYTES
    scores_bytes = scores.shape[1] * FLOAT_BYTES
    for thread in prange(scores.shape[0]):
        bounds = (*distances, line_bytes, scratch + thread * scores_bytes)
        _take_rows(places, bounds, (len(rows), num_parts), heads, place, scaling)
