from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora.expand_rows import (  # noqa: E402
    few_columns,
    load_few_b,
    store_few,
)
from loramux.kernels.gpu.pdl import axis  # noqa: E402

pytestmark = pytest.mark.usefixtures("both_orders")


@triton.jit
def _b(pool, out, ranks, first, width, LANES_FIRST: tl.constexpr):
    b = load_few_b(pool, (64, ranks), first, width, 16)
    tl.store(out + axis(16, 1, 3, LANES_FIRST) * 16 + few_columns(16), b)


@triton.jit
def _store(out, stride, num_rows, first, width):
    column = few_columns(16)
    for row in tl.static_range(2):
        store_few(column + 99.0 * row + 1.0, out + row * stride, row, num_rows, first, width, 16)


def test_a_group_has_zeros_for_ranks_and_columns_that_it_does_not_have() -> None:
    from loramux.kernels.gpu.lora import expand_rows as lora_few_triton

    pool = torch.arange(1.0, 257.0)
    out = torch.full((16, 16), -1.0)
    _b[(1,)](pool, out, 3, 16, 20, lora_few_triton.LANES_FIRST.value, num_warps=1)
    expected = torch.zeros(16, 16)
    expected[:3, :4] = pool[64 : 64 + 60].view(3, 20)[:, 16:]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_rows_and_columns_that_are_not_there_stay(num_rows: int) -> None:
    out = torch.zeros(3, 30)
    _store[(1,)](out, out.stride(0), num_rows, 16, 20, num_warps=1)
    expected = torch.zeros(3, 30)
    expected[:2, 16:20] = torch.arange(4.0) + torch.tensor([[1.0], [100.0]])
    expected[num_rows:] = 0.0
    assert torch.equal(out, expected)
