"""GEMM over 8-bit and 4-bit weights on FP8 tensor cores, for up to 128 rows.

A row of x becomes one or two rows of e4m3 codes with a scale. Two rows, a code and the code of its
remainder, carry as many bits as bfloat16, so that weight-only formats use the same instructions.
A 4-bit code c, read as a byte, is the e4m3 number c / 512: 4-bit weights need no conversion.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.pdl import num_sms, pdl_options, pdl_wait_and_launch
from loramux.kernels.quantised_ops import CodedRows, EightBitWeight, FourBitWeight

FP8_MAX = tl.constexpr(448.0)
LEAST_MAXIMUM = tl.constexpr(1e-30)
"""Largest element of a row of zeros, whose inverse is finite."""
REMAINDER_SCALE = tl.constexpr(1 / 16)
"""A remainder is at most 16 where the largest code is 448."""
NIBBLE_SCALE = tl.constexpr(512.0)
MAX_ROWS = 128
"""Rows of one launch over 8-bit weights; a tile holds all of them."""
MAX_FOUR_BIT_ROWS = 64
VECTOR_ROWS = 2
"""Rows that are multiplied on FMA units, without codes of x."""
_MIN_ROWS = 16
_VECTOR_INPUTS = 4096
_VECTOR_OUTPUTS = 4
_DEQUANTISED_INPUTS = 2048


@dataclass(frozen=True, slots=True)
class TileLaunch:
    num_outputs: int
    """Outputs of a CTA."""
    num_inputs: int
    """Inputs that a CTA reads at once."""
    num_stages: tuple[int, int]
    """Pipeline stages with one and with two terms of x."""
    num_warps: int = 4


# Fastest of 500 on an H200 with Llama-3.1-8B's shapes, by the rows of a tile. Few outputs: no more
# than one CTA of 64 outputs for each SM. A layer's four GEMMs take 64, 67, 73 and 94 us with one
# term of x, 67, 73, 86 and 144 with two; cuBLASLt's with a scale per row 102, bfloat16 116 to 136.
FEW_OUTPUTS = {
    16: TileLaunch(64, 256, (6, 6)),
    32: TileLaunch(64, 256, (6, 4)),
    64: TileLaunch(64, 128, (8, 6)),
    128: TileLaunch(64, 128, (8, 4)),
}
MANY_OUTPUTS = {
    16: TileLaunch(64, 128, (8, 4)),
    32: TileLaunch(64, 128, (8, 3)),
    64: TileLaunch(128, 128, (4, 3)),
    128: TileLaunch(128, 128, (6, 4), num_warps=8),
}
# Two terms of x, groups of 128: 54 us a layer with 16 rows and 66 with 32, of which o and down are
# split in four. With 64 rows 140, and dequantised weights in bfloat16 take about 260.
FEW_FOUR_BIT_OUTPUTS = {
    16: TileLaunch(64, 256, (3, 3)),
    32: TileLaunch(64, 256, (3, 3)),
    64: TileLaunch(128, 256, (3, 3), num_warps=8),
}
MANY_FOUR_BIT_OUTPUTS = {
    16: TileLaunch(128, 256, (4, 4)),
    32: TileLaunch(128, 256, (3, 3)),
    64: TileLaunch(128, 256, (4, 4), num_warps=8),
}


def quantise_rows(x: Tensor, *, terms: int, group: int = 0) -> CodedRows:
    """Quantise the rows of x [rows, inputs]; group: inputs whose codes are summed, 0: none."""
    num_rows, num_inputs = x.shape
    codes = x.new_empty(terms, num_rows, num_inputs, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    sums = x.new_empty(num_inputs // group, num_rows, dtype=torch.float32) if group else None
    quantise_rows_kernel[(num_rows,)](
        *(x, codes, scales, sums, num_rows),
        INPUTS=num_inputs,
        BLOCK=triton.next_power_of_2(num_inputs),
        GROUP=group,
        TERMS=terms,
        COMPILED=x.is_cuda,
        num_warps=8,
        **pdl_options(x.device.type),
    )
    return CodedRows(codes, scales, sums)


def multiply_eight_bit(x: CodedRows, weight: EightBitWeight, y: Tensor) -> None:
    """y = x @ weight.T of up to MAX_ROWS rows.

    y [rows, outputs], or float32 [splits, rows, outputs] for partial sums
    """
    terms, num_rows, num_inputs = x.codes.shape
    num_outputs, num_groups = weight.scales.shape
    num_splits = len(y) if y.ndim == 3 else 1
    rows = _tile_rows(num_rows)
    is_few = triton.cdiv(num_outputs, 64) <= num_sms(y.device.type)
    launch = (FEW_OUTPUTS if is_few else MANY_OUTPUTS)[rows]
    depth = min(launch.num_inputs, triton.next_power_of_2(num_inputs // num_splits))
    eight_bit_kernel[(triton.cdiv(num_outputs, launch.num_outputs), num_splits)](
        *(x.codes, weight.codes, weight.scales, x.scales, y, num_rows, num_outputs),
        INPUTS=num_inputs,
        GROUPS=num_groups,
        ROWS=rows,
        N=launch.num_outputs,
        K=depth if num_groups == 1 else weight.group,
        TERMS=terms,
        STAGES=launch.num_stages[terms - 1],
        SPLITS=num_splits,
        COMPILED=y.is_cuda,
        num_warps=launch.num_warps,
        **pdl_options(y.device.type),
    )


def multiply_vectors(x: Tensor, weight: EightBitWeight, y: Tensor, *, rounds: bool) -> None:
    """y = x @ weight.T of up to VECTOR_ROWS rows. rounds: use the codes of one term of x"""
    num_rows, num_inputs = x.shape
    num_outputs, num_groups = weight.scales.shape
    depth, outputs, num_warps = _VECTOR_INPUTS, _VECTOR_OUTPUTS, 4
    if num_inputs % depth:
        depth = 1024
        outputs, num_warps = (2 * _VECTOR_OUTPUTS, 4) if rounds else (2, 8)
    eight_bit_rows_kernel[(triton.cdiv(num_outputs, outputs),)](
        *(x, weight.codes, weight.scales, y, num_outputs),
        ROWS=num_rows,
        INPUTS=num_inputs,
        GROUPS=num_groups,
        GROUP=weight.group,
        N=outputs,
        K=min(depth, max(16, triton.next_power_of_2(num_inputs))),
        BLOCK=triton.next_power_of_2(num_inputs),
        QUANTISES=rounds,
        COMPILED=x.is_cuda,
        num_warps=num_warps,
        **pdl_options(x.device.type),
    )


def multiply_four_bit(x: CodedRows, weight: FourBitWeight, y: Tensor) -> None:
    """y = x @ weight.T of up to MAX_FOUR_BIT_ROWS rows; x has the sums of the weight's groups.

    y [rows, outputs], or float32 [splits, rows, outputs] for partial sums
    """
    terms, num_rows, num_inputs = x.codes.shape
    num_outputs = len(weight.codes)
    num_splits = len(y) if y.ndim == 3 else 1
    rows = _tile_rows(num_rows)
    is_few = triton.cdiv(num_outputs, 64) <= num_sms(y.device.type)
    launch = (FEW_FOUR_BIT_OUTPUTS if is_few else MANY_FOUR_BIT_OUTPUTS)[rows]
    four_bit_kernel[(triton.cdiv(num_outputs, launch.num_outputs), num_splits)](
        *(x.codes, weight.codes, weight.scales, x.scales, x.sums, y, num_rows, num_outputs),
        INPUTS=num_inputs,
        ROWS=rows,
        N=launch.num_outputs,
        GROUP=weight.group,
        TERMS=terms,
        STAGES=launch.num_stages[terms - 1],
        SPLITS=num_splits,
        COMPILED=y.is_cuda,
        num_warps=launch.num_warps,
        **pdl_options(y.device.type),
    )


def multiply_many(x: Tensor, weight: EightBitWeight) -> Tensor:
    """Compute x @ weight.T with the codes of one term of x, by cuBLASLt; one scale per output."""
    coded = quantise_rows(x, terms=1)
    return torch._scaled_mm(
        coded.codes[0],
        weight.codes.t(),
        coded.scales[:, None],
        weight.scales.t(),
        out_dtype=x.dtype,
    )


def dequantise(weight: EightBitWeight | FourBitWeight, out: Tensor) -> None:
    """Write the weight to `out` [outputs, inputs]."""
    num_outputs, num_inputs = out.shape
    grid = (num_outputs, triton.cdiv(num_inputs, _DEQUANTISED_INPUTS))
    dequantise_kernel[grid](
        *(weight.codes, weight.scales, out, num_outputs),
        INPUTS=num_inputs,
        GROUP=weight.group,
        IS_FOUR_BIT=isinstance(weight, FourBitWeight),
        BLOCK=_DEQUANTISED_INPUTS,
        num_warps=4,
    )


def _tile_rows(num_rows: int) -> int:
    return max(_MIN_ROWS, int(triton.next_power_of_2(num_rows)))


@triton.jit
def _row_scale(x):
    """Scale and its inverse of a row in float32; NaN if the row has NaN or infinity."""
    is_sound = tl.abs(x) < float("inf")
    largest = tl.maximum(tl.max(tl.where(is_sound, tl.abs(x), 0.0), 0), LEAST_MAXIMUM)
    unsound = tl.sum(tl.where(is_sound, 0.0, float("nan")), 0)
    return largest / FP8_MAX + unsound, FP8_MAX / largest


@triton.jit
def _to_fp8(x, COMPILED: tl.constexpr):
    """Round float32 numbers up to 448 to e4m3, ties to even."""
    if not COMPILED:
        # The interpreter truncates. Adding and subtracting 1.5 * 2^23 steps rounds to a step.
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 127 - 6)
        large = ((exponent + 20) << 23).to(tl.float32, bitcast=True) * 1.5
        x = (x + large) - large
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["num_rows"])
def quantise_rows_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    sum_ptr,
    num_rows,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TERMS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """codes [terms, rows, inputs]   scales [rows]   sums [groups, rows] of the codes"""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    pdl_wait_and_launch(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * INPUTS + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    scale, inverse = _row_scale(x)
    x = x * inverse
    code = _to_fp8(x, COMPILED)
    place = code_ptr + row.to(tl.int64) * INPUTS + k
    tl.store(place, code, mask=k < INPUTS)
    rounded = code.to(tl.float32)
    if TERMS == 2:
        rest = _to_fp8((x - rounded) / REMAINDER_SCALE, COMPILED)
        tl.store(place + num_rows.to(tl.int64) * INPUTS, rest, mask=k < INPUTS)
        rounded += rest.to(tl.float32) * REMAINDER_SCALE
    if GROUP > 0:
        sums = tl.sum(tl.reshape(rounded, (BLOCK // GROUP, GROUP)), 1)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(sum_ptr + group * num_rows + row, sums, mask=group < INPUTS // GROUP)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _dot(weights, x, COMPILED: tl.constexpr):
    if COMPILED:
        sums = tl.dot(weights, tl.trans(x))
    else:
        # The interpreter multiplies the bits of float8 as integers.
        sums = tl.dot(weights.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    return sums


@triton.jit
def _gemm_codes(weights, x_at, inside, low_offset, TERMS: tl.constexpr, COMPILED: tl.constexpr):
    """weights [N, K] times the codes of rows: [N, ROWS], without the scales of the rows."""
    x = tl.load(x_at, mask=inside, other=0.0)
    sums = _dot(weights, x, COMPILED)
    if TERMS == 2:
        rest = tl.load(x_at + low_offset, mask=inside, other=0.0)
        sums += _dot(weights, rest, COMPILED) * REMAINDER_SCALE
    return sums


@triton.jit
def _store_sums(
    sums, x_scale_ptr, y_ptr, num_rows, num_outputs, N: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * N + tl.arange(0, N)
    sums = sums * tl.load(x_scale_ptr + row, mask=row < num_rows, other=0.0)[None, :]
    place = y_ptr + tl.program_id(1).to(tl.int64) * num_rows * num_outputs
    place = place + row[None, :].to(tl.int64) * num_outputs + output[:, None]
    inside = (row[None, :] < num_rows) & (output[:, None] < num_outputs)
    tl.store(place, sums.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def eight_bit_kernel(  # noqa: PLR0913
    x_ptr,
    weight_ptr,
    scale_ptr,
    x_scale_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute outputs of quantised weights.

    GROUPS: scales of an output; with more than one, K is the number of inputs of a group.
    """
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside_output = tl.minimum(output, num_outputs - 1).to(tl.int64)
    k = tl.arange(0, K)
    SPAN: tl.constexpr = INPUTS // SPLITS
    begin = tl.program_id(1) * SPAN
    at = weight_ptr + inside_output[:, None] * INPUTS + begin + k[None, :]
    row = tl.arange(0, ROWS)
    x_at = x_ptr + row[:, None] * INPUTS + begin + k[None, :]
    is_row = row[:, None] < num_rows
    low_offset = num_rows.to(tl.int64) * INPUTS
    scale_at = scale_ptr + inside_output * GROUPS
    pdl_wait_and_launch(PDL)
    sums = tl.zeros((N, ROWS), tl.float32)
    for first in tl.range(0, SPAN, K, num_stages=STAGES):
        inside = is_row
        if SPAN % K == 0:
            codes = tl.load(at + first, eviction_policy="evict_first")
        else:
            is_input = (k < SPAN - first)[None, :]
            codes = tl.load(at + first, mask=is_input, other=0.0, eviction_policy="evict_first")
            inside = is_row & is_input
        part = _gemm_codes(codes, x_at + first, inside, low_offset, TERMS, COMPILED)
        if GROUPS > 1:
            part = part * tl.load(scale_at + (begin + first) // K)[:, None]
        sums += part
    if GROUPS == 1:
        sums = sums * tl.load(scale_at)[:, None]
    _store_sums(sums, x_scale_ptr, y_ptr, num_rows, num_outputs, N, ROWS)


@triton.jit
def _nibbles(codes, COMPILED: tl.constexpr):
    """Low and high 4-bit codes of bytes as e4m3 numbers code / 512."""
    if COMPILED:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            and.b32 $0, $2, 0x0f0f0f0f;
            shr.b32 t, $2, 4;
            and.b32 $1, t, 0x0f0f0f0f;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = codes & 15, codes >> 4
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scale_and_zero(pair):
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    zero = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit(do_not_specialize=["num_outputs"])
def dequantise_kernel(  # noqa: PLR0913
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_outputs,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FOUR_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < INPUTS
    if IS_FOUR_BIT:
        byte = output * (INPUTS // 2) + k // (2 * GROUP) * GROUP + k % GROUP
        codes = tl.load(weight_ptr + byte, mask=inside, other=0).to(tl.int32)
        codes = (codes >> (k // GROUP % 2) * 4) & 15
        pair = tl.load(scale_ptr + (k // GROUP) * num_outputs + output, mask=inside, other=0)
        scale, zero = _scale_and_zero(pair)
        values = (codes.to(tl.float32) - zero) * scale
    else:
        GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        scale = tl.load(scale_ptr + output * GROUPS + k // GROUP, mask=inside, other=0.0)
        codes = tl.load(weight_ptr + output * INPUTS + k, mask=inside, other=0.0)
        values = codes.to(tl.float32) * scale
    tl.store(out_ptr + output * INPUTS + k, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def four_bit_kernel(  # noqa: PLR0913
    x_ptr,
    weight_ptr,
    scale_ptr,
    x_scale_ptr,
    x_sum_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """scales: of a group and output, two float16 in a word of 32 bits, which cp.async can copy"""
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside_output = tl.minimum(output, num_outputs - 1).to(tl.int64)
    k = tl.arange(0, GROUP)
    SPAN: tl.constexpr = INPUTS // SPLITS
    begin = tl.program_id(1) * SPAN
    at = weight_ptr + inside_output[:, None] * (INPUTS // 2) + begin // 2 + k[None, :]
    row = tl.arange(0, ROWS)
    x_at = x_ptr + row[:, None] * INPUTS + begin + k[None, :]
    is_row = row < num_rows
    low_offset = num_rows.to(tl.int64) * INPUTS
    scale_at = scale_ptr + (begin // GROUP) * num_outputs.to(tl.int64) + inside_output
    sum_at = x_sum_ptr + (begin // GROUP) * num_rows + row
    pdl_wait_and_launch(PDL)
    sums = tl.zeros((N, ROWS), tl.float32)
    for first in tl.range(0, SPAN, 2 * GROUP, num_stages=STAGES):
        codes = tl.load(at + first // 2, eviction_policy="evict_first")
        low, high = _nibbles(codes, COMPILED)
        group = first // GROUP
        for half in tl.static_range(2):
            pair = tl.load(scale_at + (group + half) * num_outputs.to(tl.int64))
            scale, zero = _scale_and_zero(pair)
            total = tl.load(sum_at + (group + half) * num_rows, mask=is_row, other=0.0)
            weights = low if half == 0 else high
            part = _gemm_codes(
                weights, x_at + first + half * GROUP, is_row[:, None], low_offset, TERMS, COMPILED
            )
            part = part * NIBBLE_SCALE - zero[:, None] * total[None, :]
            sums += part * scale[:, None]
    _store_sums(sums, x_scale_ptr, y_ptr, num_rows, num_outputs, N, ROWS)


@triton.jit
def _load_part(pointers, k, left, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """K codes of each output, of which `left` are inside; evicted first: each is read once."""
    if IS_WHOLE:
        codes = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = (k < left)[None, :]
        codes = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return codes


@triton.jit
def _scales_of_rows(x_ptr, ROWS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Scales and inverses of whole rows."""
    k = tl.arange(0, BLOCK)
    scales = ()
    inverses = ()
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * INPUTS + k, mask=k < INPUTS, other=0.0)
        scale, inverse = _row_scale(x.to(tl.float32))
        scales = scales + (scale,)  # type: ignore[assignment]
        inverses = inverses + (inverse,)  # type: ignore[assignment]
    return scales, inverses


@triton.jit
def _partial_sums(weights, x, N: tl.constexpr, K: tl.constexpr):
    """Sum of 16 adjacent products: [N, K // 16] float32, each by one thread."""
    return tl.sum(tl.reshape(weights * x[None, :], (N, K // 16, 16)), 2)


@triton.jit(do_not_specialize=["num_outputs"])
def eight_bit_rows_kernel(  # noqa: PLR0913
    x_ptr,
    weight_ptr,
    scale_ptr,
    y_ptr,
    num_outputs,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISES: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One or two rows on FMA units. QUANTISES: round x to e4m3 at the scale of its row"""
    IS_WHOLE: tl.constexpr = INPUTS % K == 0
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside_output = tl.minimum(output, num_outputs - 1).to(tl.int64)
    k = tl.arange(0, K)
    at = weight_ptr + inside_output[:, None] * INPUTS + k[None, :]
    scale_at = scale_ptr + inside_output * GROUPS
    codes = _load_part(at, k, INPUTS, K, IS_WHOLE)
    pdl_wait_and_launch(PDL)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((N, K // 16), tl.float32),)  # type: ignore[assignment]
    if QUANTISES:
        scales, inverses = _scales_of_rows(x_ptr, ROWS, INPUTS, BLOCK)
    for first in tl.range(0, INPUTS, K, num_stages=1):
        if first > 0:
            codes = _load_part(at + first, k, INPUTS - first, K, IS_WHOLE)
        if GROUPS > 1:
            group = tl.minimum((first + tl.arange(0, K // 16) * 16) // GROUP, GROUPS - 1)
            of_group = tl.load(scale_at[:, None] + group[None, :])
        added = ()
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * INPUTS + first + k, mask=k < INPUTS - first, other=0.0)
            values = x.to(tl.float32)
            if QUANTISES:
                values = _to_fp8(values * inverses[row], COMPILED).to(tl.float32)
            more = _partial_sums(codes.to(tl.float32), values, N, K)
            if GROUPS > 1:
                more = more * of_group
            added = added + (sums[row] + more,)  # type: ignore[assignment]
        sums = added
    for row in tl.static_range(ROWS):
        y = tl.sum(sums[row], 1)
        if GROUPS == 1:
            y = y * tl.load(scale_at)
        if QUANTISES:
            y = y * scales[row]
        place = y_ptr + row * num_outputs.to(tl.int64) + output
        tl.store(place, y.to(y_ptr.dtype.element_ty), mask=output < num_outputs)
