"""x @ weight.T of few rows: the weights' bytes are all that counts.

A library's product waits until the kernel ahead of it has ended, and then begins to read. These
kernels start while that one runs; those of one row have read their first weights by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.pdl import pdl_options, pdl_wait_and_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductLaunch:
    most_rows: int
    num_outputs: int
    """Of a program."""
    num_inputs: int
    """That a program reads at once."""
    num_stages: int | None = None
    """Reads under way in tiles, on matrix units; None: rows one by one, on vector units."""


# On an H200, Llama-3.1-8B shapes, in a row of layers without attention: 107, 112, 120 and 125 us a
# layer, where a library's products take 125, 129, 130 and 132. With 64 rows those are faster.
LAUNCHES = (
    ProductLaunch(most_rows=1, num_outputs=4, num_inputs=2048),
    ProductLaunch(most_rows=2, num_outputs=4, num_inputs=1024),
    ProductLaunch(most_rows=16, num_outputs=64, num_inputs=128, num_stages=7),
    ProductLaunch(most_rows=32, num_outputs=64, num_inputs=128, num_stages=7),
)
MOST_ROWS = LAUNCHES[-1].most_rows
SHARED_BYTES = 176 * 1024
"""Of a multiprocessor: what the largest tiles take."""


def product(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """y = x @ weight.T, of up to MOST_ROWS rows.

    x [rows, inputs]   weight [outputs, inputs]   y [rows, outputs], all without gaps
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    launch = next(launch for launch in LAUNCHES if num_rows <= launch.most_rows)
    most_inputs = launch.num_inputs * 2 // x.itemsize  # The same bytes in float32.
    grid = (triton.cdiv(num_outputs, launch.num_outputs),)
    options = {
        "INPUTS": num_inputs,
        "N": launch.num_outputs,
        "K": min(most_inputs, max(16, triton.next_power_of_2(num_inputs))),
        "num_warps": 4,
        **pdl_options(x.device.type),
    }
    if launch.num_stages is None:
        rows_kernel[grid](x, weight, y, num_outputs, ROWS=num_rows, **options)
        return
    tile_kernel[grid](
        *(x, weight, y, num_rows, num_outputs),
        ROWS=launch.most_rows,
        STAGES=launch.num_stages,
        **options,
    )


@triton.jit
def _locate(weight_ptr, num_outputs, INPUTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """This program's outputs [N], and the first of their weights [N, K]."""
    output = tl.program_id(0) * N + tl.arange(0, N)
    # Beyond the last output it is read again, and not stored.
    at = weight_ptr + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * INPUTS
    return output, at + tl.arange(0, K)[None, :]


@triton.jit
def _load(pointers, left, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """[.., K] of a matrix' columns, of which `left` are there; read once, so out of the cache."""
    if IS_WHOLE:
        values = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = (tl.arange(0, K) < left)[None, :]
        values = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return values


@triton.jit
def _add_products(weights, x_ptr, left, N: tl.constexpr, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Sums of eight neighbours: [N, K // 8] float32, each by one thread."""
    k = tl.arange(0, K)
    if IS_WHOLE:  # noqa: SIM108 - known when compiling
        x = tl.load(x_ptr + k)
    else:
        x = tl.load(x_ptr + k, mask=k < left, other=0.0)
    products = weights.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(products, (N, K // 8, 8)), 2)


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
        first_sum = _add_products(weights, x_ptr + row * INPUTS, INPUTS, N, K, IS_WHOLE)
        sums = sums + (first_sum,)  # type: ignore[assignment]
    for first in tl.range(K, INPUTS, K, num_stages=1):
        weights = _load(at + first, INPUTS - first, K, IS_WHOLE)
        added = ()
        for row in tl.static_range(ROWS):
            x = x_ptr + row * INPUTS + first
            more = _add_products(weights, x, INPUTS - first, N, K, IS_WHOLE)
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
