"""Compiled elementwise ops between GEMMs (float32): one loop each."""

from __future__ import annotations

import numpy as np
import torch
from numba import float32, njit, prange
from torch import Tensor

from loramux.kernels.cpu_jit.runtime import EXACT, OPTIONS, exp, floats_at
from loramux.kernels.cpu_jit.tiles import FLOAT_BYTES
from loramux.kernels.ops import (
    Array,
    Epilogue,
    KVTarget,
    Norm,
    NormArrays,
    RotateWriteArrays,
    Rotation,
)
from loramux.kernels.reference import elementwise as fused_torch
from loramux.types.kv import KVLayout

rotation = fused_torch.rotation
norm_columns = fused_torch.norm_columns

# With fewer elements, waking the other threads takes longer than the work.
_PARALLEL_ELEMENTS = 65536
_PARALLEL_EXPS = 20480

_ADD_NORM_ROWS, _SILU_MUL_ROWS = range(1, 3)


def add_norm(
    x: Tensor | None, residual: Tensor, norm: Norm | None, after: Norm | None = None
) -> Tensor:
    """residual += x, in place; returns norm(residual). With `after`, x is normed first.

    Without a norm it returns the residual itself. x, residual [rows, hidden]
    """
    if norm is None:
        return fused_torch.add_norm(x, residual, norm, after)
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    rows = None if x is None else x.contiguous().numpy()
    if rows is not None and after is not None:
        rows = rows.copy()
    norms = norm_arrays(norm), None if after is None else norm_arrays(after)
    add_norm_into(rows, residual.contiguous().numpy(), norms, out.numpy())
    return out


def add_norm_into(
    x: Array | None, residual: Array, norms: tuple[NormArrays, NormArrays | None], out: Array
) -> None:
    """`add_norm` into `out`; with a second norm, x is overwritten."""
    norm, after = norms
    if x is None:
        _norm(residual, norm.weight, norm.eps, out)
        return
    if after is not None:
        _norm(x, after.weight, after.eps, x)
    run = _add_norm_parallel if residual.size >= _PARALLEL_ELEMENTS else _add_norm
    run(x, residual, norm.weight, norm.eps, out)


def norm_add_into(x: Array, residual: Array, after: NormArrays | None) -> None:
    """residual += after(x); x is overwritten."""
    if after is not None:
        _norm(x, after.weight, after.eps, x)
    residual += x


def add_norm_epilogue(residual: Array, norm: NormArrays, out: Array) -> Epilogue:
    """`add_norm_into` of each row of a GEMM."""
    return Epilogue(_ADD_NORM_ROWS, residual, out, norm.weight, norm.eps)


def silu_mul_epilogue(out: Array) -> Epilogue:
    """`silu_mul_into` of each row of a GEMM."""
    return Epilogue(_SILU_MUL_ROWS, out, out, out[0, :0], np.float32(0))


def run_epilogue(epilogue: Epilogue, y: Array) -> None:
    if epilogue.kind == _ADD_NORM_ROWS:
        norms = NormArrays(epilogue.weight, epilogue.eps), None
        add_norm_into(y, epilogue.source, norms, epilogue.out)
    else:
        silu_mul_into(y, epilogue.out)


def rotate_write(qkv: Tensor, rotation: Rotation, target: KVTarget) -> Tensor:
    """Rotates queries in place and returns them; keys, rotated, and values go into their pages.

    qkv [rows, (heads + 2 * kv_heads) * head_dim] -> [rows, heads, head_dim], a view of it
    """
    layout = target.layout
    head_norm = None if rotation.head_norm is None else norm_arrays(rotation.head_norm)
    place = RotateWriteArrays(
        rotation.cos.numpy(), rotation.sin.numpy(), target.slots.numpy(), target.storage.numpy()
    )
    rotate_write_into(qkv.numpy(), head_norm, place, layout, target.layer)
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    return heads[:, : heads.shape[1] - 2 * layout.num_kv_heads]


def rotate_write_into(
    qkv: Array,
    head_norm: NormArrays | None,
    place: RotateWriteArrays,
    layout: KVLayout,
    layer: int,
) -> None:
    num_queries = qkv.shape[1] // layout.head_dim - 2 * layout.num_kv_heads
    if head_norm is not None:
        heads = qkv.reshape(len(qkv), -1, layout.head_dim)
        _norm_heads(heads, head_norm.weight, head_norm.eps)
    shape = num_queries, layout.num_kv_heads, layout.block_tokens, layer
    _rotate_write(qkv, place.cos, place.sin, place.slots, shape, place.storage)


def activate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up. gate_up [rows, 2 * inner], gate first -> [rows, inner]"""
    if activation != "silu":
        return fused_torch.activate_mul(gate_up, activation)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    silu_mul_into(gate_up.numpy(), out.numpy())
    return out


def silu_mul_into(gate_up: Array, out: Array) -> None:
    run = _silu_mul_parallel if out.size >= _PARALLEL_EXPS else _silu_mul
    run(gate_up, out)


def norm_arrays(norm: Norm) -> NormArrays:
    return NormArrays(norm.weight.numpy(), np.float32(norm.eps))


@njit(inline="always", error_model="numpy")
def _factor(total, size, eps):
    return float32(1.0) / np.sqrt(total / float32(size) + eps)


@njit("void(float32[::1], float32, float32[::1], float32[::1])", **EXACT)
def _scale_row(x, factor, weight, out):
    for j in range(out.size):
        out[j] = x[j] * factor * weight[j]


@njit("void(float32[:, ::1], float32[::1], float32, float32[:, ::1])", **OPTIONS)
def _norm(x, weight, eps, out):
    for i in range(x.shape[0]):
        x_row, out_row = x[i], out[i]
        total = float32(0.0)
        for j in range(x_row.size):
            total += x_row[j] * x_row[j]
        _scale_row(x_row, _factor(total, x_row.size, eps), weight, out_row)


@njit("void(float32[::1], float32[::1], float32[::1], float32, float32[::1])", **OPTIONS)
def _add_norm_row(x, residual, weight, eps, out):
    total = float32(0.0)
    for j in range(out.size):
        value = residual[j] + x[j]
        residual[j] = value
        total += value * value
    _scale_row(residual, _factor(total, out.size, eps), weight, out)


_ADD_NORM = "void(float32[:, ::1], float32[:, ::1], float32[::1], float32, float32[:, ::1])"


@njit(_ADD_NORM, **OPTIONS)
def _add_norm(x, residual, weight, eps, out):
    for i in range(out.shape[0]):
        _add_norm_row(x[i], residual[i], weight, eps, out[i])


@njit(_ADD_NORM, parallel=True, **OPTIONS)
def _add_norm_parallel(x, residual, weight, eps, out):
    for i in prange(out.shape[0]):
        _add_norm_row(x[i], residual[i], weight, eps, out[i])


@njit("void(float32[:, :, ::1], float32[:, ::1], float32)", **OPTIONS)
def _norm_heads(heads, weight, eps):
    for i in range(heads.shape[0]):
        for h in range(weight.shape[0]):
            head, weight_row = heads[i, h], weight[h]
            total = float32(0.0)
            for d in range(head.size):
                total += head[d] * head[d]
            factor = _factor(total, head.size, eps)
            for d in range(head.size):
                head[d] = head[d] * factor * weight_row[d]


@njit(
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1], int32[::1], UniTuple(int64, 4),"
    "float32[:, ::1])",
    **OPTIONS,
)
def _rotate_write(qkv, cos, sin, slots, shape, storage):
    num_queries, num_kv_heads, block, layer = shape
    dim = cos.shape[1]
    half, width = dim // 2, num_kv_heads * dim
    for i in range(qkv.shape[0]):
        row = qkv[i]
        cos_first, cos_second = cos[i, :half], cos[i, half:]
        sin_first, sin_second = sin[i, :half], sin[i, half:]
        for h in range(num_queries + num_kv_heads):
            first, second = row[h * dim :][:half], row[h * dim + half :][:half]
            for d in range(half):
                a, b = first[d], second[d]
                first[d] = a * cos_first[d] + b * sin_first[d]
                second[d] = b * cos_second[d] + a * sin_second[d]
        slot = slots[i]
        if slot < 0:
            continue
        page, k = storage[slot // block], (layer * 2 * block + slot % block) * width
        start, v = num_queries * dim, k + block * width
        page[k : k + width] = row[start : start + width]
        page[v : v + width] = row[start + width : start + 2 * width]


@njit("void(float32[::1], float32[::1], float32[::1])", **EXACT)
def _silu_mul_row(gate, up, out):
    for j in range(out.size):
        out[j] = gate[j] * up[j] / (float32(1.0) + exp(-gate[j]))


@njit("void(float32[:, ::1], float32[:, ::1])", **OPTIONS)
def _silu_mul(gate_up, out):
    inner = out.shape[1]
    for i in range(out.shape[0]):
        _silu_mul_row(gate_up[i, :inner], gate_up[i, inner:], out[i])


@njit("void(float32[:, ::1], float32[:, ::1])", parallel=True, **OPTIONS)
def _silu_mul_parallel(gate_up, out):
    inner = out.shape[1]
    for i in prange(out.shape[0]):
        _silu_mul_row(gate_up[i, :inner], gate_up[i, inner:], out[i])


@njit("void(int64, UniTuple(int64, 4), UniTuple(int64, 2), UniTuple(int64, 2), float32)", **OPTIONS)
def apply_epilogue(kind, places, widths, rows, eps):
    """Apply an epilogue to rows of y. places: addresses of y, source, out, weight

    widths: of y and out   rows: first, stop
    """
    y, source, out, weight = places
    width, out_width = widths
    for i in range(rows[0], rows[1]):
        row, at = y + i * width * FLOAT_BYTES, i * out_width * FLOAT_BYTES
        target = floats_at(out + at, out_width)
        if kind == _ADD_NORM_ROWS:
            x, residual = floats_at(row, out_width), floats_at(source + at, out_width)
            _add_norm_row(x, residual, floats_at(weight, out_width), eps, target)
        elif kind == _SILU_MUL_ROWS:
            up = floats_at(row + out_width * FLOAT_BYTES, out_width)
            _silu_mul_row(floats_at(row, out_width), up, target)
