"""What launches ask of a device that is none."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loramux.kernels.gpu import pdl as launch_triton
from loramux.kernels.gpu.pdl import opaque  # noqa: E402


def test_kernels_wait_for_each_other_without_a_gpu() -> None:
    assert launch_triton.pdl_options("cpu") == {"PDL": False}


def test_the_interpreter_counts_as_several_sms() -> None:
    assert launch_triton.num_sms("cpu") > 1
    assert launch_triton.shared_bytes("cpu") > 2**20, "as much as any kernel needs"


@triton.jit
def _copy(x_ptr, out_ptr, SIZE: tl.constexpr, IS_COMPILED: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, opaque(tl.load(x_ptr + index), IS_COMPILED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_the_compiler_cannot_see_through_is_the_same_value(dtype: torch.dtype) -> None:
    """Catches halves of a register that change places; on a GPU, where they are packed."""
    x = torch.randn(256).to(dtype)
    out = torch.zeros_like(x)
    _copy[(1,)](x, out, SIZE=256, IS_COMPILED=x.is_cuda)
    assert torch.equal(out, x)
