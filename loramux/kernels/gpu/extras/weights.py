"""GEMMs of tiles of rows with weights of their own, whose rows lie in pages of the pool.

A few persistent programs take blocks of outputs of all tiles; without tiles they exit at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.extras import tables as names
from loramux.kernels.gpu.extras.access import MATRIX_WORDS, NUM_ROWS, TOKENS, WIDTH, row_offset
from loramux.kernels.gpu.extras.tables import (
    HEAD_A,
    HEAD_B,
    HEAD_ROWS,
    HEAD_WEIGHT,
    MAX_HEAD_RANK,
    ExtrasTables,
    ReplacedOutputs,
)
from loramux.kernels.gpu.pdl import pdl_options, pdl_wait_and_launch

_OUTPUTS = 64
_BYTES_OF_ROW = 256
_STAGES = 4
_PROGRAMS_PER_SM = 2
_TILE_WORDS: tl.constexpr = tl.constexpr(names.TILE_WORDS)
_SLOT: tl.constexpr = tl.constexpr(names.TILE_SLOT)
_START: tl.constexpr = tl.constexpr(names.TILE_START)
_ROWS: tl.constexpr = tl.constexpr(names.TILE_NUM_ROWS)
_WEIGHT: tl.constexpr = tl.constexpr(names.TILE_WEIGHT)
_H_START: tl.constexpr = tl.constexpr(names.TILE_H_START)
_CHAIN: tl.constexpr = tl.constexpr(names.TILE_CHAIN)


def replace_outputs(tables: ExtrasTables, y: Tensor, x: Tensor, linear: ReplacedOutputs) -> None:
    """y = x @ weight.T + bias at the projections that the row's adapter replaces.

    x [rows, in]   y [rows, outputs]
    """
    widths = (*linear.widths, 0, 0)[:3]
    _launch(tables, x, y, linear.first_matrix, widths, bias=linear.bias, IS_H=False)


def replace_logits(tables: ExtrasTables, logits: Tensor, hidden: Tensor) -> None:
    """logits = hidden @ head.T, or some columns of it; -inf past the last row of the head.

    hidden [rows, hidden]   logits [rows, columns]
    """
    model, widths = tables.model_matrices, (logits.shape[1], 0, 0)
    _launch(tables, hidden, logits, model + HEAD_WEIGHT, widths, IS_H=False)
    _launch(tables, hidden, logits, model + HEAD_ROWS, widths, IS_H=False, SCATTERS=True)


def add_low_rank_logits(tables: ExtrasTables, logits: Tensor, hidden: Tensor) -> None:
    """logits += weight * hidden @ A.T @ B.T"""
    model = tables.model_matrices
    h = hidden.new_empty(tables.limits.max_h_rows, MAX_HEAD_RANK)
    _launch(tables, hidden, h, model + HEAD_A, (MAX_HEAD_RANK, 0, 0), IS_H=True)
    _expand[_grid(tables)](
        *(tables.pool, tables.matrices, tables.heap, tables.words, h, logits),
        *(logits.stride(0), logits.shape[1], model + HEAD_B),
        *(tables.matrices.stride(0), tables.limits.tiles_at),
        H_WIDTH=MAX_HEAD_RANK,
        **_options(tables, hidden),
    )


def _grid(tables: ExtrasTables) -> tuple[int]:
    return (tables.num_sms * _PROGRAMS_PER_SM,)


def _options(tables: ExtrasTables, x: Tensor) -> dict[str, Any]:
    return {
        "ROWS": max(16, tables.limits.tile_rows),
        "N": _OUTPUTS,
        "K": max(16, min(_BYTES_OF_ROW // x.itemsize, triton.next_power_of_2(x.shape[1]))),
        "PAGE": tables.pool.shape[1],
        "STAGES": _STAGES,
        "num_warps": 4,
        **pdl_options(x.device.type),
    }


def _launch(  # noqa: PLR0913
    tables: ExtrasTables,
    x: Tensor,
    y: Tensor,
    matrix: int,
    widths: tuple[int, ...],
    *,
    IS_H: bool,
    SCATTERS: bool = False,
    bias: Tensor | None = None,
) -> None:
    _weights[_grid(tables)](
        *(tables.pool, tables.matrices, tables.heap, tables.words, x, y, bias),
        *(x.stride(0), y.stride(0), *widths, matrix),
        *(tables.matrices.stride(0), tables.limits.tiles_at),
        INPUTS=x.shape[1],
        IS_H=IS_H,
        SCATTERS=SCATTERS,
        **_options(tables, x),
    )


@triton.jit
def _locate(block, width0, width1, width2, N: tl.constexpr):
    """Slice, first column in the slice, the slice's first column in y, and its width."""
    blocks0 = tl.cdiv(width0, N)
    blocks1 = blocks0 + tl.cdiv(width1, N)
    is_past0 = block >= blocks0
    is_past1 = block >= blocks1
    number = is_past0.to(tl.int32) + is_past1.to(tl.int32)
    block -= tl.where(is_past1, blocks1, tl.where(is_past0, blocks0, 0))
    width = tl.where(is_past1, width2, tl.where(is_past0, width1, width0))
    out_start = tl.where(is_past0, width0, 0) + tl.where(is_past1, width1, 0)
    return number, block * N, out_start, width


@triton.jit
def _dot(
    sums, weight_at, x_at, is_row, num_inputs,
    K: tl.constexpr, IS_WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return sums + weight @ x.T: [N, ROWS]"""
    k = tl.arange(0, K)
    for start in tl.range(0, num_inputs, K, num_stages=STAGES):
        if IS_WHOLE:
            weight = tl.load(weight_at + start)
            x = tl.load(x_at + start, mask=is_row, other=0.0)
        else:
            inside = (k < num_inputs - start)[None, :]
            weight = tl.load(weight_at + start, mask=inside, other=0.0)
            x = tl.load(x_at + start, mask=is_row & inside, other=0.0)
        sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["width0", "width1", "width2", "matrix", "slot_stride", "tiles_at"])
def _weights(
    pool, matrices, heap, words, x, y, bias, x_stride, y_stride, width0, width1, width2, matrix,
    slot_stride, tiles_at,
    INPUTS: tl.constexpr, IS_H: tl.constexpr, SCATTERS: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write x @ weight.T of each tile to its rows of y, or of h if IS_H."""
    pdl_wait_and_launch(PDL)
    num_tiles = tl.load(words)
    blocks = tl.cdiv(width0, N) + tl.cdiv(width1, N) + tl.cdiv(width2, N)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, K)
    for work in tl.range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0), num_stages=1):
        # Tiles of one block of outputs are adjacent: those of one adapter share the weight in L2.
        block = work // num_tiles
        tile = words + tiles_at + (work - block * num_tiles) * _TILE_WORDS
        number, start, out_start, width = _locate(block, width0, width1, width2, N)
        slot = tl.load(tile + _SLOT).to(tl.int64)
        at = matrices + slot * slot_stride + (matrix + number) * MATRIX_WORDS
        num_outputs = tl.load(at + NUM_ROWS)
        is_needed = num_outputs > 0
        if IS_H or SCATTERS:
            is_needed = start < num_outputs
        if is_needed:
            first = tl.load(tile + _START)
            is_row = row < tl.load(tile + _ROWS)
            column = start + tl.arange(0, N)
            # Outputs past the end clamp to the last one; they are masked or replaced.
            of = row_offset(heap, at, tl.minimum(column, num_outputs - 1), INPUTS, PAGE)
            source = x + (first + row).to(tl.int64)[:, None] * x_stride + k[None, :]
            sums = _dot(
                tl.zeros((N, ROWS), tl.float32), pool + of[:, None] + k[None, :], source,
                is_row[:, None], INPUTS, K, INPUTS % K == 0, STAGES,
            )  # fmt: skip
            if bias is not None:
                own = tl.load(bias + out_start + column, mask=column < width, other=0.0)
                sums += own.to(tl.float32)[:, None]
            inside = column < width
            if IS_H:
                weight = tl.load(tile + _WEIGHT).to(tl.float32, bitcast=True)
                sums = sums * weight
                first = tl.load(tile + _H_START)
            elif SCATTERS:
                inside = column < num_outputs
                column = tl.load(heap + tl.load(at + TOKENS) + column, mask=inside, other=0)
                inside = inside & (column < width)
            else:
                sums = tl.where((column < num_outputs)[:, None], sums, float("-inf"))
            target = y + (first + row).to(tl.int64)[None, :] * y_stride
            target += (out_start + column)[:, None]
            mask = inside[:, None] & is_row[None, :]
            tl.store(target, sums.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["matrix", "slot_stride", "tiles_at"])
def _expand(
    pool, matrices, heap, words, h, y, y_stride, width, matrix, slot_stride, tiles_at,
    H_WIDTH: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y += h @ B.T over all adapters of each tile's rows."""
    pdl_wait_and_launch(PDL)
    num_tiles = tl.load(words)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, K)
    work_items = num_tiles * tl.cdiv(width, N)
    for work in tl.range(tl.program_id(0), work_items, tl.num_programs(0), num_stages=1):
        block = work // num_tiles
        tile = words + tiles_at + (work - block * num_tiles) * _TILE_WORDS
        is_row = row < tl.load(tile + _ROWS)
        column = block * N + tl.arange(0, N)
        sums = tl.zeros((N, ROWS), tl.float32)
        num_ranks = 0
        # No iteration for tiles whose rows another tile stands for.
        for number in range(tl.load(tile + _CHAIN)):
            one = tile + number * _TILE_WORDS
            slot = tl.load(one + _SLOT).to(tl.int64)
            at = matrices + slot * slot_stride + matrix * MATRIX_WORDS
            num_outputs = tl.load(at + NUM_ROWS)
            if num_outputs > 0:
                rank = tl.load(at + WIDTH)
                num_ranks += rank
                first = tl.load(one + _H_START)
                is_output = column < num_outputs
                of = row_offset(heap, at, tl.where(is_output, column, 0), rank, PAGE)
                weight_at = pool + of[:, None] + k[None, :]
                source = h + (first + row)[:, None] * H_WIDTH + k[None, :]
                added = _dot(
                    tl.zeros((N, ROWS), tl.float32), weight_at, source, is_row[:, None], rank, K,
                    False, STAGES,
                )  # fmt: skip
                sums += tl.where(is_output[:, None], added, 0.0)
        if num_ranks > 0:
            at = y + (tl.load(tile + _START) + row).to(tl.int64)[None, :] * y_stride
            at += column[:, None]
            mask = (column < width)[:, None] & is_row[None, :]
            value = tl.load(at, mask=mask, other=0.0).to(tl.float32) + sums
            tl.store(at, value.to(y.dtype.element_ty), mask=mask)
