"""gate_up GEMM with the activation in its epilogue, for steps of 33 to 128 rows.

A CTA holds all rows, so that weights are read once. cuBLASLt's GEMM is as fast, but writes its
outputs for another kernel to read; and it starts to read when the kernel ahead of it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loramux.kernels.gpu.elementwise import activate
from loramux.kernels.gpu.gemm.small_m import MAX_ROWS as SMALL_M_ROWS
from loramux.kernels.gpu.pdl import (
    pdl_options,
    pdl_wait_and_launch,
    shared_bytes,
    supports_tma,
)

_INPUTS = 64
"""K of a tile: 128 bytes of 16-bit elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluLaunch:
    max_rows: int
    num_outputs: int
    """Outputs of a CTA, each from one row of gate and one of up."""
    num_stages: int
    """Pipeline stages."""
    num_warps: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of 16-bit tiles; barriers take less than a kilobyte."""
        lines = self.max_rows + 2 * self.num_outputs
        return 1024 + self.num_stages * lines * _INPUTS * 2


# On an H200, Llama-3.1-8B's shapes: steps of 64 rows are 1.5 % faster, of 128 rows 3 %. With 192
# rows, which are two tiles, cuBLASLt and a separate activation are faster.
LAUNCHES = (
    SwigluLaunch(max_rows=64, num_outputs=64, num_stages=4, num_warps=4),
    SwigluLaunch(max_rows=128, num_outputs=128, num_stages=4, num_warps=8),
)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_swiglu` takes them; it is not faster on every device and model."""
    device_type = x.device.type
    return (
        SMALL_M_ROWS < len(x) <= LAUNCHES[-1].max_rows
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.shape[1] % 8 == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and supports_tma(device_type)
        and _launch_for(len(x)).shared_bytes <= shared_bytes(device_type)
    )


def linear_swiglu(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, where x @ weight.T is gate and up side by side.

    x [rows, inputs], up to 128 rows   weight [2 * inner, inputs] -> [rows, inner]
    x and weight are contiguous, at addresses that are multiples of 16 (TMA)
    """
    num_rows, num_inputs = x.shape
    inner, launch = len(weight) // 2, _launch_for(num_rows)
    out = x.new_empty(num_rows, inner)
    swiglu_kernel[(triton.cdiv(inner, launch.num_outputs),)](
        TensorDescriptor.from_tensor(x, [launch.max_rows, _INPUTS]),
        TensorDescriptor.from_tensor(
            weight.view(2, inner, num_inputs), [2, launch.num_outputs, _INPUTS]
        ),
        out,
        num_rows,
        INNER=inner,
        INPUTS=num_inputs,
        ACTIVATION=activation,
        ROWS=launch.max_rows,
        N=launch.num_outputs,
        K=_INPUTS,
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        **pdl_options(x.device.type),
    )
    return out


def _launch_for(num_rows: int) -> SwigluLaunch:
    return next(launch for launch in LAUNCHES if num_rows <= launch.max_rows)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(  # noqa: PLR0913
    x_tiles,
    weight_tiles,
    out_ptr,
    num_rows,
    INNER: tl.constexpr,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x_tiles, weight_tiles: TMA descriptors of [ROWS, K], and of [2, N, K] of gate and up, with
    zeros past the end

    gate and up are one MMA: half as many instructions, each with twice the outputs.
    """
    first = tl.program_id(0) * N
    pdl_wait_and_launch(PDL)
    sums = tl.zeros((ROWS, 2 * N), tl.float32)
    for k in tl.range(0, INPUTS, K, num_stages=STAGES):
        weights = tl.reshape(weight_tiles.load([0, first, k]), (2 * N, K))
        sums = tl.dot(x_tiles.load([0, k]), weights.T, sums)
    gate, up = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, N)), (0, 2, 1)))
    row = tl.arange(0, ROWS)[:, None]
    column = first + tl.arange(0, N)[None, :]
    mixed = activate(gate, ACTIVATION) * up
    inside = (row < num_rows) & (column < INNER)
    tl.store(out_ptr + row * INNER + column, mixed.to(out_ptr.dtype.element_ty), mask=inside)
