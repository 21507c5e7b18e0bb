"""Reference: the elementwise ops between a decoder's GEMMs, computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.kernels.ops import KVTarget, Norm, Rotation


def add_norm(
    x: Tensor | None, residual: Tensor, norm: Norm | None, after: Norm | None = None
) -> Tensor:
    """residual += x, in place; returns norm(residual). With `after`, x is normed first.

    Without a norm it returns the residual itself.

    x, residual [rows, hidden]
    x may be split-K partial sums, float32 [splits, rows, hidden]: reduced and rounded
    """
    if x is not None:
        if x.ndim == 3:
            x = reduce_splits(x, residual.dtype)
        if after is not None:
            x = _norm(x.float(), after).to(x.dtype)
        residual.copy_(x.float() + residual.float())
    if norm is None:
        return residual
    return _norm(residual.float(), norm).to(residual.dtype)


def norm_columns(x: Tensor, norm: Norm) -> None:
    """Norms each row of x [rows, size] in place; rows may be strided."""
    x.copy_(_norm(x.float(), norm))


def rotation(positions: Tensor, frequencies: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """cos * |signs| and sin * signs of positions * frequencies: [rows, head_dim] float32 each.

    positions [rows] int32   frequencies, signs [head_dim] float32
    """
    angles = positions.float()[:, None] * frequencies
    return angles.cos() * signs.abs(), angles.sin() * signs


def rotate_write(qkv: Tensor, rotation: Rotation, target: KVTarget) -> Tensor:
    """Rotates queries in place and returns them; keys, rotated, and values go into their pages.

    qkv [rows, (heads + 2 * kv_heads) * head_dim] -> [rows, heads, head_dim], a view of it
    """
    layout, num_rows = target.layout, qkv.shape[0]
    heads = qkv.view(num_rows, -1, layout.head_dim)
    num_queries = heads.shape[1] - 2 * layout.num_kv_heads
    num_rotated = num_queries + layout.num_kv_heads
    qk = heads[:, :num_rotated].float()
    if rotation.head_norm is not None:
        qk = _norm(qk, rotation.head_norm)
    swapped = qk.roll(layout.head_dim // 2, -1)
    qk = qk * rotation.cos.float()[:, None] + swapped * rotation.sin.float()[:, None]
    qk = qk.to(qkv.dtype)
    heads[:, :num_queries] = qk[:, :num_queries]
    _store(target, qk[:, num_queries:], heads[:, num_rotated:])
    return heads[:, :num_queries]


def activate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up. gate_up [rows, 2 * inner], gate first -> [rows, inner]"""
    gate, up = gate_up.float().chunk(2, -1)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
    return (gate * up).to(gate_up.dtype)


def linear_swiglu(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, where x @ weight.T is gate and up side by side; rounded once.

    x [rows, inputs]   weight [2 * inner, inputs] -> [rows, inner]
    """
    return activate_mul(F.linear(x.float(), weight.float()), activation).to(x.dtype)


def reduce_splits(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum split-K partial sums [splits, ...]; rounded once, like a GEMM without split-K."""
    return partials.sum(0).to(dtype)


def _norm(x: Tensor, norm: Norm) -> Tensor:
    mean = x.square().mean(-1, keepdim=True)
    # Where the squares overflow, the inverse is NaN: 0 would hide it from the logits.
    inverse = torch.where(mean.isfinite(), torch.rsqrt(mean + norm.eps), torch.nan)
    return x * inverse * norm.weight.float()


def _store(target: KVTarget, k: Tensor, v: Tensor) -> None:
    layout = target.layout
    shape = (layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
    pages = target.storage[:, : layout.num_elements].view(-1, *shape)
    rows = (target.slots >= 0).nonzero().squeeze(1)
    slots = target.slots[rows].long()
    page, token = slots // layout.block_tokens, slots % layout.block_tokens
    pages[page, target.layer, 0, token] = k[rows].to(pages.dtype)
    pages[page, target.layer, 1, token] = v[rows].to(pages.dtype)
