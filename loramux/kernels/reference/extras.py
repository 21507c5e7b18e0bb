"""Reference of the extras of adapters: one row after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loramux.kernels.gpu.extras.tables import (
    EMBED_A,
    EMBED_B,
    EMBED_ROWS,
    EMBED_WEIGHT,
    HEAD_A,
    HEAD_B,
    HEAD_BIAS,
    HEAD_GAIN,
    HEAD_ROWS,
    HEAD_WEIGHT,
    HEADER_WORDS,
    ExtrasTables,
    ReplacedOutputs,
)
from loramux.kernels.gpu.lora.work_list import ALIGN_ELEMENTS


def scale_add(tables: ExtrasTables, y: Tensor, vector: int) -> None:
    """y = y * (1 + sum of weight * gain) + sum of weight * bias, in place. y [rows, out]"""
    pool = tables.pool.view(-1)
    for row, entries in _rows(tables, len(y)):
        gain, bias = (torch.zeros(y.shape[1], device=y.device) for _ in range(2))
        for slot, weight in entries:
            for total, address in zip((gain, bias), tables.vectors[slot, vector], strict=True):
                if address >= 0:
                    start = int(address) * ALIGN_ELEMENTS
                    total += weight * pool[start : start + y.shape[1]].float()
        y[row] = y[row].float() * (1 + gain) + bias


def scale_logits(tables: ExtrasTables, logits: Tensor) -> None:
    """`scale_add` of the head, whose gains and biases lie in pages. logits [rows, columns]"""
    for row, entries in _rows(tables, len(logits)):
        gain, bias = (torch.zeros(logits.shape[1], device=logits.device) for _ in range(2))
        for slot, weight in entries:
            for total, kind in ((gain, HEAD_GAIN), (bias, HEAD_BIAS)):
                if (matrix := _matrix(tables, slot, kind)) is not None:
                    total[: len(matrix.rows)] += weight * matrix.rows[:, 0].float()
        is_finite = logits[row] > float("-inf")
        scaled = logits[row].float() * (1 + gain) + bias
        logits[row] = torch.where(is_finite, scaled, float("-inf"))


def embed_rows(tables: ExtrasTables, y: Tensor, token_ids: Tensor, scale: float) -> None:
    """Replace the embedding of each row, or adds low rank to it, times the model's scale.

    y [rows, hidden]   token_ids [rows]
    """
    for row, entries in _rows(tables, len(y)):
        token = int(token_ids[row])
        value = y[row].float()
        for slot, weight in entries:
            whole, some = (_matrix(tables, slot, kind) for kind in (EMBED_WEIGHT, EMBED_ROWS))
            if whole is not None and token < len(whole.rows):
                value = (whole.rows[token].float() * scale).to(y.dtype).float()
            if some is not None and token in some.token_ids:
                own = some.rows[some.token_ids.index(token)]
                value = (own.float() * scale).to(y.dtype).float()
            a, b = (_matrix(tables, slot, kind) for kind in (EMBED_A, EMBED_B))
            if a is not None and b is not None and token < len(a.rows):
                value = value + scale * weight * (a.rows[token].float() @ b.rows.float())
        y[row] = value


def replace_outputs(tables: ExtrasTables, y: Tensor, x: Tensor, linear: ReplacedOutputs) -> None:
    """y = x @ weight.T + bias at the projections that the row's adapter replaces.

    x [rows, in]   y [rows, outputs]
    """
    for row, entries in _rows(tables, len(y)):
        for slot, _ in entries:
            start = 0
            for number, width in enumerate(linear.widths):
                matrix = _find(tables, slot, linear.first_matrix + number)
                if matrix is not None:
                    value = matrix.rows.float() @ x[row].float()
                    if linear.bias is not None:
                        value += linear.bias[start : start + width].float()
                    y[row, start : start + width] = value
                start += width


def replace_logits(tables: ExtrasTables, logits: Tensor, hidden: Tensor) -> None:
    """logits = hidden @ head.T, or some columns of it; -inf past the last row of the head.

    hidden [rows, hidden]   logits [rows, columns]
    """
    for row, entries in _rows(tables, len(logits)):
        for slot, _ in entries:
            whole, some = (_matrix(tables, slot, kind) for kind in (HEAD_WEIGHT, HEAD_ROWS))
            if whole is not None:
                own = (whole.rows.float() @ hidden[row].float())[: logits.shape[1]]
                logits[row] = float("-inf")
                logits[row, : len(own)] = own.to(logits.dtype)
            if some is not None:
                tokens = torch.tensor(some.token_ids, device=logits.device)
                own = (some.rows.float() @ hidden[row].float()).to(logits.dtype)
                is_column = tokens < logits.shape[1]
                logits[row, tokens[is_column]] = own[is_column]


def add_low_rank_logits(tables: ExtrasTables, logits: Tensor, hidden: Tensor) -> None:
    """logits += weight * hidden @ A.T @ B.T"""
    for row, entries in _rows(tables, len(logits)):
        for slot, weight in entries:
            a, b = (_matrix(tables, slot, kind) for kind in (HEAD_A, HEAD_B))
            if a is not None and b is not None:
                added = weight * (b.rows.float() @ (a.rows.float() @ hidden[row].float()))
                logits[row, : len(added)] += added.to(logits.dtype)


@dataclass(frozen=True, slots=True)
class _Matrix:
    rows: Tensor
    token_ids: list[int]


def _rows(tables: ExtrasTables, num_rows: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """Yield the (slot, weight) pairs of each row that has any."""
    words, limits = tables.words.cpu().numpy(), tables.limits
    ranges = words[HEADER_WORDS : limits.entries_at].reshape(-1, 2)[:num_rows]
    entries = words[limits.entries_at : limits.tiles_at].reshape(-1, 2)
    for row, (first, count) in enumerate(ranges.tolist()):
        if count:
            some = entries[first : first + count]
            weights = some[:, 1].copy().view(np.float32).tolist()
            yield row, list(zip(some[:, 0].tolist(), weights, strict=True))


def _matrix(tables: ExtrasTables, slot: int, kind: int) -> _Matrix | None:
    return _find(tables, slot, tables.model_matrices + kind)


def _find(tables: ExtrasTables, slot: int, index: int) -> _Matrix | None:
    """Return a matrix gathered from its pages; None: the adapter has none."""
    num_rows, width, per_page, start, pages, tokens = tables.matrices[slot, index, :6].tolist()
    if num_rows == 0:
        return None
    parts = []
    for number, first in enumerate(range(0, num_rows, per_page)):
        count = min(per_page, num_rows - first)
        page = tables.pool[int(tables.heap[pages + number])]
        at = start * ALIGN_ELEMENTS
        parts.append(page[at : at + count * width].view(count, width))
    return _Matrix(torch.cat(parts), tables.heap[tokens : tokens + num_rows].tolist())
