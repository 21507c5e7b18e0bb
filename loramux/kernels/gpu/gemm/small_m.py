"""Small-M GEMM: x @ weight.T of up to 32 rows, bound by the bytes of the weights.

A library's GEMM starts to read when the kernel ahead of it has ended. These kernels are launched
with PDL while that kernel runs; the one-row kernels load their first weights before they wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.pdl import pdl_options, pdl_wait_and_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallMLaunch:
    max_rows: int
    num_outputs: int
    """Outputs of a CTA."""
    num_inputs: int
    """Inputs that a CTA reads at once."""
    num_stages: int | None = None
    """Pipeline stages of a tile on tensor cores; None: rows one by one, on FMA units."""


# On an H200, Llama-3.1-8B shapes, consecutive layers without attention: 107, 112, 120 and 125 us a
# layer, where cuBLASLt's GEMMs take 125, 129, 130 and 132. With 64 rows those are faster.
LAUNCHES = (
    SmallMLaunch(max_rows=1, num_outputs=4, num_inputs=2048),
    SmallMLaunch(max_rows=2, num_outputs=4, num_inputs=1024),
    SmallMLaunch(max_rows=16, num_outputs=64, num_inputs=128, num_stages=7),
    SmallMLaunch(max_rows=32, num_outputs=64, num_inputs=128, num_stages=7),
)
MAX_ROWS = LAUNCHES[-1].max_rows
SHARED_BYTES = 176 * 1024
"""Shared memory of the largest tiles."""


def gemm(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """y = x @ weight.T of up to MAX_ROWS rows.

    x [rows, inputs]   weight [outputs, inputs]   y [rows, outputs], all contiguous
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    launch = next(launch for launch in LAUNCHES if num_rows <= launch.max_rows)
    max_inputs = launch.num_inputs * 2 // x.itemsize  # As many bytes in float32.
    grid = (triton.cdiv(num_outputs, launch.num_outputs),)
    options = {
        "INPUTS": num_inputs,
        "N": launch.num_outputs,
        "K": min(max_inputs, max(16, triton.next_power_of_2(num_inputs))),
        "num_warps": 4,
        **pdl_options(x.device.type),
    }
    if launch.num_stages is None:
        rows_kernel[grid](x, weight, y, num_outputs, ROWS=num_rows, **options)
        return
    tile_kernel[grid](
        *(x, weight, y, num_rows, num_outputs),
        ROWS=launch.max_rows,
        STAGES=launch.num_stages,
        **options,
    )


@triton.jit
def _locate(weight_ptr, num_outputs, INPUTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Return this CTA's outputs [N], and pointers to the first of their weights [N, K]."""
    output = tl.program_id(0) * N + tl.arange(0, N)
    # Outputs past the end clamp to the last one; the store masks them.
    at = weight_ptr + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * INPUTS
    return output, at + tl.arange(0, K)[None, :]


@triton.jit
def _load(pointers, left, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """[.., K] columns, of which `left` are inside; evicted first, since each is read once."""
    if IS_WHOLE:
        values = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = (tl.arange(0, K) < left)[None, :]
        values = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return values


@triton.jit
def _partial_sums(weights, x_ptr, left, N: tl.constexpr, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Sum of eight adjacent products: [N, K // 8] float32, each by one thread."""
    k = tl.arange(0, K)
    if IS_WHOLE:  # noqa: SIM108 - known when compiling
        x = tl.load(x_ptr + k)
    else:
        x = tl.load(x_ptr + k, mask=k < left, other=0.0)
    terms = weights.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(terms, (N, K // 8, 8)), 2)


@triton.jit(do_not_specialize=["num_outputs"])
def rows_kernel(  # noqa: PLR0913
    x_ptr,
    weight_ptr,
    y_ptr,
    num_outputs,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    IS_WHOLE: tl.constexpr = INPUTS % K == 0
    output, at = _locate(weight_ptr, num_outputs, INPUTS, N, K)
    weights = _load(at, INPUTS, K, IS_WHOLE)
    pdl_wait_and_launch(PDL)
    sums = ()
    for row in tl.static_range(ROWS):
        first_sum = _partial_sums(weights, x_ptr + row * INPUTS, INPUTS, N, K, IS_WHOLE)
        sums = sums + (first_sum,)  # type: ignore[assignment]
    for first in tl.range(K, INPUTS, K, num_stages=1):
        weights = _load(at + first, INPUTS - first, K, IS_WHOLE)
        added = ()
        for row in tl.static_range(ROWS):
            x = x_ptr + row * INPUTS + first
            more = _partial_sums(weights, x, INPUTS - first, N, K, IS_WHOLE)
            added = added + (sums[row] + more,)  # type: ignore[assignment]
        sums = added
    for row in tl.static_range(ROWS):
        y = tl.sum(sums[row], 1).to(y_ptr.dtype.element_ty)
        place = y_ptr + row * num_outputs.to(tl.int64) + output
        tl.store(place, y, mask=output < num_outputs)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def tile_kernel(  # noqa: PLR0913
    x_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    IS_WHOLE: tl.constexpr = INPUTS % K == 0
    output, at = _locate(weight_ptr, num_outputs, INPUTS, N, K)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, K)
    x_at = x_ptr + row[:, None] * INPUTS + k[None, :]
    is_row = row[:, None] < num_rows
    pdl_wait_and_launch(PDL)
    sums = tl.zeros((N, ROWS), tl.float32)
    for first in tl.range(0, INPUTS, K, num_stages=STAGES):
        weights = _load(at + first, INPUTS - first, K, IS_WHOLE)
        inside = is_row
        if not IS_WHOLE:
            inside = is_row & (k < INPUTS - first)[None, :]
        x = tl.load(x_at + first, mask=inside, other=0.0)
        sums = tl.dot(weights, tl.trans(x), sums, input_precision="ieee")
    place = y_ptr + row[None, :].to(tl.int64) * num_outputs + output[:, None]
    inside = (row[None, :] < num_rows) & (output[:, None] < num_outputs)
    tl.store(place, sums.to(y_ptr.dtype.element_ty), mask=inside)
