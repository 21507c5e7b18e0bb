"""Fast on a CPU, in float32: a row reads its keys and values in their pages; long prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import float32, get_num_threads, njit, prange
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels import attention_cpu
from loramux.kernels.attention_tile_numba import (
    MIX_WIDTH,
    TOKENS,
    heads_at,
    mix_tile,
    score_tile,
)
from loramux.kernels.interface import (
    AttendArgs,
    PagedLayout,
    Rows,
    SequenceRows,
    empty_rows,
    kv_slots,
)
from loramux.kernels.math_numba import OPTIONS, exp
from loramux.kernels.tile_numba import FLOAT_BYTES

# A chunk of several rows that sees more tokens than this is cheaper as products of matrices.
_MAX_TOKENS_BY_ROW = 128


@dataclass(frozen=True, slots=True)
class Plan:
    layout: PagedLayout
    slots: Tensor
    """[rows] int32: page * block_tokens + token."""
    rows: NDArray[np.int32]
    """[n, 3] of the rows that attend by themselves: row, its line of page_table, tokens it sees."""
    page_table: NDArray[np.int32]
    shared: attention_cpu.Plan | None
    """The chunks that attend as matrices; None: there is none."""


def plan(sequences: Sequence[SequenceRows], layout: PagedLayout, device: torch.device) -> Plan:
    block = layout.block_tokens
    alone = [s for s in sequences if s.num_rows == 1 or s.num_tokens <= _MAX_TOKENS_BY_ROW]
    others = [s for s in sequences if s.num_rows > 1 and s.num_tokens > _MAX_TOKENS_BY_ROW]
    rows = [
        (s.row_start + i, line, s.position_start + i + 1)
        for line, s in enumerate(alone)
        for i in range(s.num_rows)
    ]
    num_pages = [-(-s.num_tokens // block) for s in alone]
    page_table = np.zeros((len(alone), max(num_pages, default=0)), dtype=np.int32)
    for line, (sequence, count) in enumerate(zip(alone, num_pages, strict=True)):
        page_table[line, :count] = sequence.page_ids[:count]
    return Plan(
        layout=layout,
        slots=torch.tensor(kv_slots(sequences, block), dtype=torch.int32),
        rows=np.array(rows, dtype=np.int32).reshape(-1, 3),
        page_table=page_table,
        shared=attention_cpu.plan(others, layout, device) if others else None,
    )


def write_kv(storage: Tensor, plan: Plan, layer: int, k: Tensor, v: Tensor) -> None:
    """Stores the step's keys and values in their pages."""
    layout = plan.layout
    shape = (layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
    pages = storage.view(-1, *shape)
    page, token = plan.slots.long() // layout.block_tokens, plan.slots.long() % layout.block_tokens
    pages[page, layer, 0, token] = k
    pages[page, layer, 1, token] = v


def attend(storage: Tensor, plan: Plan, q: Tensor, args: AttendArgs) -> Tensor:
    """Row i attends to its own sequence's tokens up to itself: softmax(q K^T * scale) V."""
    out = empty_rows(q.shape[0], q.shape[1] * q.shape[2])
    attend_into(out, storage, plan, q, args)
    return out.tensor


def attend_into(out: Rows, storage: Tensor, plan: Plan, q: Tensor, args: AttendArgs) -> None:
    num_rows, num_heads, head_dim = q.shape
    layout = plan.layout
    if plan.shared is not None:
        attention_cpu.attend_into(out.tensor, storage, plan.shared, q, args)
    if not len(plan.rows):
        return
    # Few rows leave threads without work, unless each kind of key heads is a piece of its own.
    is_few = len(plan.rows) < 2 * get_num_threads()
    _attend_rows(
        storage.numpy(),
        plan.page_table,
        plan.rows,
        _whole_rows(q),
        out.array.reshape(num_rows, num_heads, head_dim),
        (layout.num_kv_heads, layout.block_tokens, layout.num_kv_heads if is_few else 1),
        (args.layer, args.sliding_window or 0),
        (np.float32(args.scale), np.float32(args.softcap or 0.0)),
    )


def _whole_rows(q: Tensor) -> NDArray[np.float32]:
    """q [rows, heads, dim], perhaps with gaps between its rows, as [rows, stride] without gaps."""
    stride = q.stride(0)
    found: NDArray[np.float32] = q.as_strided((q.shape[0], stride), (stride, 1)).numpy()
    return found


@njit(
    "void(float32[::1], int64, float32[::1], UniTuple(int64, 4), int64, float32[:, ::1], int64)",
    **OPTIONS,
)
def _score(keys, count, q, heads, dim, scores, at):
    """scores[h, at + t] = q[h] . keys[t, h // repeat]"""
    first, stop, repeat, width = heads
    num_tiled = count // TOKENS * TOKENS if dim % MIX_WIDTH == 0 else 0
    row_bytes, stride = scores.shape[1] * FLOAT_BYTES, width * FLOAT_BYTES
    for t in range(0, num_tiled, TOKENS):
        for head in range(first, stop):
            source = keys.ctypes.data + (t * width + head * dim) * FLOAT_BYTES
            target = scores.ctypes.data + (at + t) * FLOAT_BYTES
            h, end = head * repeat, (head + 1) * repeat
            while h < end:
                query, row = q.ctypes.data + h * dim * FLOAT_BYTES, h - first * repeat
                args = (query, source, stride, dim, target + row * row_bytes, row_bytes)
                score_tile(heads_at(h, end), args)
                h += heads_at(h, end)
    for t in range(num_tiled, count):
        for h in range(first * repeat, stop * repeat):
            total, k = float32(0.0), t * width + h // repeat * dim
            for d in range(dim):
                total += q[h * dim + d] * keys[k + d]
            scores[h - first * repeat, at + t] = total


@njit("void(float32[::1], float32, float32)", **OPTIONS)
def _softmax(scores, scale, softcap):
    if softcap > 0:
        for t in range(scores.size):
            scores[t] = softcap * np.tanh(scores[t] * scale / softcap)
        scale = float32(1.0)
    best = scores[0]
    for t in range(scores.size):
        best = max(best, scores[t])
    total = float32(0.0)
    for t in range(scores.size):
        scores[t] = exp((scores[t] - best) * scale)
        total += scores[t]
    factor = float32(1.0) / total
    for t in range(scores.size):
        scores[t] *= factor


@njit(
    "void(float32[::1], int64, UniTuple(int64, 4), int64, float32[:, ::1], int64, float32[:, ::1])",
    **OPTIONS,
)
def _mix(values, count, heads, dim, scores, at, sums):
    """sums[h] += scores[h, at + t] * values[t, h // repeat]"""
    first, stop, repeat, width = heads
    row_bytes, stride, sum_bytes = (
        scores.shape[1] * FLOAT_BYTES,
        width * FLOAT_BYTES,
        dim * FLOAT_BYTES,
    )
    tiled = dim if dim % MIX_WIDTH == 0 else 0
    for head in range(stop - first):
        h, end = head * repeat, (head + 1) * repeat
        while h < end and tiled:
            row = scores.ctypes.data + h * row_bytes + at * FLOAT_BYTES
            for d in range(0, tiled, MIX_WIDTH):
                value = values.ctypes.data + ((first + head) * dim + d) * FLOAT_BYTES
                target = sums.ctypes.data + h * sum_bytes + d * FLOAT_BYTES
                args = (row, row_bytes, value, stride, count, target, sum_bytes)
                mix_tile(heads_at(h, end), args)
            h += heads_at(h, end)
    for t in range(count if not tiled else 0):
        for h in range((stop - first) * repeat):
            v, into = t * width + (first + h // repeat) * dim, sums[h]
            for d in range(dim):
                into[d] += scores[h, at + t] * values[v + d]


@njit(
    "void(float32[:, ::1], int32[:, ::1], int32[:, ::1], float32[:, ::1], float32[:, :, ::1],"
    "UniTuple(int64, 3), UniTuple(int64, 2), UniTuple(float32, 2))",
    parallel=True,
    **OPTIONS,
)
def _attend_rows(storage, page_table, rows, q, out, shape, place, scaling):
    num_kv_heads, block, num_parts = shape
    layer, window = place
    dim, repeat = out.shape[2], out.shape[1] // num_kv_heads
    num_keys = block * num_kv_heads * dim
    heads_each = num_kv_heads // num_parts
    for item in prange(len(rows) * num_parts):
        row, line, stop = rows[item // num_parts]
        start = max(0, stop - window) if window > 0 else 0
        first = item % num_parts * heads_each
        heads = (first, first + heads_each, repeat, num_kv_heads * dim)
        scores = np.empty((heads_each * repeat, stop - start), dtype=np.float32)
        sums = out[row, first * repeat : (first + heads_each) * repeat]
        for number in range(start // block, (stop + block - 1) // block):
            begin, end = max(start, number * block), min(stop, (number + 1) * block)
            page, at = storage[page_table[line, number]], layer * 2 * num_keys
            keys = page[at + begin % block * heads[3] : at + num_keys]
            _score(keys, end - begin, q[row], heads, dim, scores, begin - start)
        for head in range(scores.shape[0]):
            _softmax(scores[head], scaling[0], scaling[1])
            sums[head, :] = float32(0.0)
        for number in range(start // block, (stop + block - 1) // block):
            begin, end = max(start, number * block), min(stop, (number + 1) * block)
            page, at = storage[page_table[line, number]], layer * 2 * num_keys + num_keys
            values = page[at + begin % block * heads[3] : at + num_keys]
            _mix(values, end - begin, heads, dim, scores, begin - start, sums)
