"""The elementwise ops between a decoder's GEMMs, one kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.pdl import (
    pdl_options,
    pdl_wait_and_launch,
)
from loramux.kernels.ops import KVTarget, Norm, Rotation

_HEADS_PER_PROGRAM = 16


def add_norm(
    x: Tensor | None, residual: Tensor, norm: Norm | None, after: Norm | None = None
) -> Tensor:
    """residual += x, in place; returns norm(residual). With `after`, x is normed first.

    Without a norm it returns the residual itself.

    x, residual [rows, hidden]; rows of x may be strided
    x may be split-K partial sums, contiguous float32 [splits, rows, hidden]: reduced and rounded
    """
    if x is None and norm is None:
        return residual
    num_rows, size = residual.shape
    out = residual if norm is None else torch.empty_like(residual)
    _add_norm[(num_rows,)](
        x,
        residual,
        None if norm is None else norm.weight,
        None if after is None else after.weight,
        out,
        size if x is None else x.stride(-2),
        0.0 if norm is None else norm.eps,
        0.0 if after is None else after.eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PARTS=1 if x is None or x.ndim == 2 else len(x),
        num_warps=4 if size <= 2048 else 8,
        **pdl_options(residual.device.type),
    )
    return out


def norm_columns(x: Tensor, norm: Norm) -> None:
    """Norms each row of x [rows, size] in place; rows may be strided."""
    num_rows, size = x.shape
    _norm_columns[(num_rows,)](
        x,
        norm.weight,
        x.stride(0),
        norm.eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,
        **pdl_options(x.device.type),
    )


def rotation(positions: Tensor, frequencies: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """cos * |signs| and sin * signs of positions * frequencies: [rows, head_dim] float32 each.

    positions [rows] int32   frequencies, signs [head_dim] float32
    """
    num_rows, head_dim = positions.shape[0], frequencies.shape[0]
    cos, sin = frequencies.new_empty(2, num_rows, head_dim)
    _rotation[(num_rows,)](
        positions,
        frequencies,
        signs,
        cos,
        sin,
        SIZE=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **pdl_options(positions.device.type),
    )
    return cos, sin


def rotate_write(qkv: Tensor, rotation: Rotation, target: KVTarget) -> Tensor:
    """Rotates queries in place and returns them; keys, rotated, and values go into their pages.

    qkv [rows, (heads + 2 * kv_heads) * head_dim] -> [rows, heads, head_dim], a view of it
    """
    layout, num_rows = target.layout, qkv.shape[0]
    heads = qkv.view(num_rows, -1, layout.head_dim)
    num_queries = heads.shape[1] - 2 * layout.num_kv_heads
    norm = rotation.head_norm
    _rotate_write[(num_rows, triton.cdiv(heads.shape[1], _HEADS_PER_PROGRAM))](
        qkv,
        rotation.cos,
        rotation.sin,
        target.storage,
        target.slots,
        None if norm is None else norm.weight,
        qkv.stride(0),
        target.storage.stride(0),
        target.layer * 2 * layout.block_tokens * layout.num_kv_heads * layout.head_dim,
        0.0 if norm is None else norm.eps,
        NUM_QUERIES=num_queries,
        KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        BLOCK_TOKENS=layout.block_tokens,
        HEADS=_HEADS_PER_PROGRAM,
        HALF=triton.next_power_of_2(layout.head_dim // 2),
        num_warps=4,
        **pdl_options(qkv.device.type),
    )
    return heads[:, :num_queries]


def activate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up. gate_up [rows, 2 * inner], gate first -> [rows, inner]"""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, inner)
    block = min(1024, triton.next_power_of_2(inner))
    _activate_mul[(num_rows, triton.cdiv(inner, block))](
        gate_up,
        out,
        gate_up.stride(0),
        INNER=inner,
        ACTIVATION=activation,
        BLOCK=block,
        num_warps=4,
        **pdl_options(gate_up.device.type),
    )
    return out


@triton.jit
def scaled(x, weight, eps, SIZE: tl.constexpr):
    """x / rms(x) * weight"""
    return x * inverse_rms(tl.sum(x * x, 0), eps, SIZE) * weight.to(tl.float32)


@triton.jit
def inverse_rms(squares, eps, SIZE: tl.constexpr):
    """1 / rms of SIZE values by the sum of their squares: NaN where it overflows, not 0."""
    return tl.where(squares < float("inf"), tl.rsqrt(squares / SIZE + eps), float("nan"))


@triton.jit
def load_residual(at, inside):
    """Return the residual in float32, written two kernels ago or earlier where a GEMM is added to
    it.

    So it may be read before the PDL wait, bypassing the SM's L1 cache, which may hold old data.
    """
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def load_sum(at, inside, part_step, dtype, PARTS: tl.constexpr):
    """Return the sum of split-K partial sums, rounded once like a GEMM without split-K."""
    total = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * part_step, mask=inside, other=0.0)
    return total.to(dtype)


@triton.jit
def _add_norm(  # noqa: PLR0913
    x_ptr,
    residual_ptr,
    weight_ptr,
    after_ptr,
    out_ptr,
    x_stride,
    eps,
    after_eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if x_ptr is None:
        # The kernel ahead may have written it.
        pdl_wait_and_launch(PDL)
        total = load_residual(residual_ptr + at, inside)
    else:
        total = load_residual(residual_ptr + at, inside)
        pdl_wait_and_launch(PDL)
        x_row = x_ptr + tl.program_id(0).to(tl.int64) * x_stride
        part_step = tl.num_programs(0).to(tl.int64) * x_stride
        x = load_sum(x_row + column, inside, part_step, residual_ptr.dtype.element_ty, PARTS)
        if after_ptr is not None:
            after = tl.load(after_ptr + column, mask=inside, other=0.0)
            x = scaled(x.to(tl.float32), after, after_eps, SIZE).to(x.dtype)
        # The sum is normed as it is stored, rounded.
        stored = (total + x.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, stored, mask=inside)
        total = stored.to(tl.float32)
    if weight_ptr is not None:
        normed = scaled(total, weight, eps, SIZE)
        tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_columns(  # noqa: PLR0913
    x_ptr,
    weight_ptr,
    stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    at = x_ptr + tl.program_id(0).to(tl.int64) * stride + column
    pdl_wait_and_launch(PDL)
    x = tl.load(at, mask=inside, other=0.0)
    tl.store(at, scaled(x.to(tl.float32), weight, eps, SIZE).to(x.dtype), mask=inside)


@triton.jit
def _rotation(  # noqa: PLR0913
    positions_ptr,
    frequencies_ptr,
    signs_ptr,
    cos_ptr,
    sin_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    frequency = tl.load(frequencies_ptr + column, mask=inside)
    sign = tl.load(signs_ptr + column, mask=inside)
    pdl_wait_and_launch(PDL)
    angle = tl.load(positions_ptr + row).to(tl.float32) * frequency
    at = row * SIZE + column
    tl.store(cos_ptr + at, tl.cos(angle) * tl.abs(sign), mask=inside)
    tl.store(sin_ptr + at, tl.sin(angle) * sign, mask=inside)


@triton.jit
def _rotate_write(  # noqa: PLR0913
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    storage_ptr,
    slots_ptr,
    norm_ptr,
    qkv_stride,
    page_stride,
    layer_start,
    eps,
    NUM_QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, HALF)[None, :]
    is_rotated = head < NUM_QUERIES + KV_HEADS
    inside = (head < NUM_QUERIES + 2 * KV_HEADS) & (dim < MIDDLE)
    angles = load_angles(cos_ptr, sin_ptr, row * HEAD_DIM + dim, dim < MIDDLE, MIDDLE)
    slot = tl.load(slots_ptr + row)
    at = qkv_ptr + row * qkv_stride + head * HEAD_DIM + dim
    pdl_wait_and_launch(PDL)
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + MIDDLE, mask=inside, other=0.0)
    rotated_low, rotated_high = rotate_halves(
        low.to(tl.float32), high.to(tl.float32), angles, norm_ptr, eps, head,
        is_rotated & inside, HEAD_DIM, HALF,
    )  # fmt: skip
    rotated_low = rotated_low.to(low.dtype)
    rotated_high = rotated_high.to(high.dtype)
    # All of a head must be read before any of it is overwritten.
    tl.debug_barrier()
    is_query = inside & (head < NUM_QUERIES)
    tl.store(at, rotated_low, mask=is_query)
    tl.store(at + MIDDLE, rotated_high, mask=is_query)
    if slot >= 0:
        block = (slot // BLOCK_TOKENS).to(tl.int64) * page_stride + layer_start
        block += slot % BLOCK_TOKENS * (KV_HEADS * HEAD_DIM)
        # Values follow the keys of the whole block.
        first = tl.where(is_rotated, NUM_QUERIES, NUM_QUERIES + KV_HEADS - BLOCK_TOKENS * KV_HEADS)
        where = storage_ptr + block + (head - first) * HEAD_DIM + dim
        is_key = inside & is_rotated & (head >= NUM_QUERIES)
        tl.store(where, rotated_low, mask=is_key)
        tl.store(where + MIDDLE, rotated_high, mask=is_key)
        is_value = inside & (head >= NUM_QUERIES + KV_HEADS)
        tl.store(where, low, mask=is_value)
        tl.store(where + MIDDLE, high, mask=is_value)


@triton.jit
def load_angles(cos_ptr, sin_ptr, at, inside, MIDDLE: tl.constexpr):
    """cos and sin of heads' second halves; the first have the same, sin with the other sign."""
    cos = tl.load(cos_ptr + at + MIDDLE, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at + MIDDLE, mask=inside, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def rotate_halves(  # noqa: PLR0913
    low, high, angles, norm_ptr, eps, head, inside, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """Halves of heads, normed if there is a weight, and rotated: [heads or rows, HALF] float32.

    angles: of load_angles   head: of every line, or of all   inside: what has a weight
    """
    if norm_ptr is not None:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = inverse_rms(squares, eps, HEAD_DIM)[:, None]
        at = norm_ptr + head * HEAD_DIM + tl.arange(0, HALF)[None, :]
        low *= inverse * tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high *= inverse * tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    cos, sin = angles
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _activate_mul(  # noqa: PLR0913
    gate_up_ptr,
    out_ptr,
    stride,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = None if INNER % BLOCK == 0 else column < INNER
    gate_at = gate_up_ptr + row * stride + column
    out_at = out_ptr + row * INNER + column
    pdl_wait_and_launch(PDL)
    gate = tl.load(gate_at, mask=inside).to(tl.float32)
    up = tl.load(gate_at + INNER, mask=inside).to(tl.float32)
    mixed = activate(gate, ACTIVATION) * up
    tl.store(out_at, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """gate float32"""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if ACTIVATION == "silu":
        gate = _times_sigmoid(gate, gate * -LOG2_E)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # gelu by tanh is gate * sigmoid(2 * sqrt(2 / pi) * (gate + 0.044715 * gate ** 3)).
        FIRST: tl.constexpr = -2.0 * 0.7978845608028654 * LOG2_E
        THIRD: tl.constexpr = 0.044715 * FIRST
        gate = _times_sigmoid(gate, gate * (FIRST + THIRD * gate * gate))
    return gate


@triton.jit
def _times_sigmoid(x, power):
    """x / (1 + 2 ** power)

    By the inverse root, twice: one instruction for all of its range, where a division has eight.
    """
    inverse = tl.rsqrt(1.0 + tl.exp2(power))
    return x * inverse * inverse
