"""Fast on a CPU, in float32: the operations between the matrix products, each one loop."""

from __future__ import annotations

import numpy as np
import torch
from numba import float32, njit, prange
from torch import Tensor

from loramux.kernels import fused_torch
from loramux.kernels.fused_torch import KVTarget, Norm, Rotation
from loramux.kernels.math_numba import OPTIONS, exp

rotation = fused_torch.rotation

# With fewer elements than this, waking the other threads takes longer than the work.
_PARALLEL_ELEMENTS = 65536


def add_norm(x: Tensor | None, residual: Tensor, norm: Norm, after: Norm | None = None) -> Tensor:
    """residual += x, in place; returns norm(residual). With `after`, x is normed first.

    x, residual [rows, hidden]
    """
    if x is None:
        return _normed(residual, norm)
    if after is not None:
        x = _normed(x, after)
    out = torch.empty_like(residual)
    run = _add_norm_parallel if residual.numel() >= _PARALLEL_ELEMENTS else _add_norm
    eps = np.float32(norm.eps)
    run(x.contiguous().numpy(), residual.numpy(), norm.weight.numpy(), eps, out.numpy())
    return out


def rotate_write(qkv: Tensor, rotation: Rotation, target: KVTarget) -> Tensor:
    """Rotates queries in place and returns them; keys, rotated, and values go into their pages.

    qkv [rows, (heads + 2 * kv_heads) * head_dim] -> [rows, heads, head_dim], a view of it
    """
    layout, num_rows = target.layout, qkv.shape[0]
    heads = qkv.view(num_rows, -1, layout.head_dim)
    num_queries = heads.shape[1] - 2 * layout.num_kv_heads
    if rotation.head_norm is not None:
        norm = rotation.head_norm
        _norm_heads(heads.numpy(), norm.weight.numpy(), np.float32(norm.eps))
    _rotate_write(
        qkv.numpy(),
        rotation.cos.numpy(),
        rotation.sin.numpy(),
        target.slots.numpy(),
        (num_queries, layout.num_kv_heads, layout.block_tokens, target.layer),
        target.storage.numpy(),
    )
    return heads[:, :num_queries]


def activate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up. gate_up [rows, 2 * inner], gate first -> [rows, inner]"""
    if activation != "silu":
        return fused_torch.activate_mul(gate_up, activation)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    run = _silu_mul_parallel if out.numel() >= _PARALLEL_ELEMENTS else _silu_mul
    run(gate_up.numpy(), out.numpy())
    return out


def _normed(x: Tensor, norm: Norm) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x.contiguous().numpy(), norm.weight.numpy(), np.float32(norm.eps), out.numpy())
    return out


@njit(inline="always", error_model="numpy")
def _factor(total, size, eps):
    return float32(1.0) / np.sqrt(total / float32(size) + eps)


@njit("void(float32[:, ::1], float32[::1], float32, float32[:, ::1])", **OPTIONS)
def _norm(x, weight, eps, out):
    for i in range(x.shape[0]):
        x_row, out_row = x[i], out[i]
        total = float32(0.0)
        for j in range(x_row.size):
            total += x_row[j] * x_row[j]
        factor = _factor(total, x_row.size, eps)
        for j in range(x_row.size):
            out_row[j] = x_row[j] * factor * weight[j]


@njit("void(float32[::1], float32[::1], float32[::1], float32, float32[::1])", **OPTIONS)
def _add_norm_row(x, residual, weight, eps, out):
    total = float32(0.0)
    for j in range(out.size):
        value = residual[j] + x[j]
        residual[j] = value
        total += value * value
    factor = _factor(total, out.size, eps)
    for j in range(out.size):
        out[j] = residual[j] * factor * weight[j]


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


@njit("void(float32[::1], float32[::1], float32[::1])", **OPTIONS)
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
