from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora.mma_layout import (  # noqa: E402
    add_ordered,
    load_ordered_b,
    load_ordered_h,
    order_columns,
    order_rows,
)
from tests.unit.kernels.conftest import DEVICE, output_of_compiler  # noqa: E402


@triton.jit
def _add(  # noqa: PLR0913
    y, tail, b_pool, out, num_rows, ranks, count, WIDTH: tl.constexpr, WARPS: tl.constexpr,
    J: tl.constexpr,
):  # fmt: skip
    group = 0, ranks, 0, 0.5
    row = order_rows()
    column = order_columns(WARPS, J)
    inside = (row < num_rows) & (column < count)
    b = load_ordered_b(b_pool, group, 0, count, WIDTH, WARPS, J)
    h = load_ordered_h(tail, 16, 16, group, num_rows, b.dtype, WARPS)
    values = tl.load(y + row * WIDTH + column, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + column, add_ordered(values, h, b, WARPS, J), mask=inside)


@pytest.mark.usefixtures("both_orders")
@pytest.mark.parametrize("per_lane", [2, 4, 8])
@pytest.mark.parametrize("num_warps", [1, 2, 4])
@pytest.mark.parametrize(("num_rows", "ranks"), [(16, 16), (5, 3), (16, 1), (1, 16)])
def test_every_row_gets_its_ranks_and_columns(
    num_rows: int, ranks: int, num_warps: int, per_lane: int
) -> None:
    """All that is there, and nothing else, however lanes and warps share it."""
    width = num_warps * 8 * per_lane
    count = width - 3
    y, h = torch.randn(16, width), torch.randn(16, 16)
    b = torch.randn(ranks, width)
    out = torch.full_like(y, 7.0)
    _add[(1,)](y, h, b, out, num_rows, ranks, count, width, num_warps, per_lane)
    expected = torch.full_like(y, 7.0)
    expected[:num_rows, :count] = (y + 0.5 * h[:, :ranks] @ b)[:num_rows, :count]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.kernels.gpu.lora_augmented.tiles import expand_kernel

types = {"y_ptr": "*bf16", "out_ptr": "*bf16", "pool": "*bf16", "records": "*i32", "work": "*i32"}
constants = {"SIZE": 4096, "WARPS": 2, "J": 8, "PARTS": 1, "EARLY_B": False, "PDL": True}
for loops in (False, True):
    known = {**constants, "LOOPS": loops}
    names = expand_kernel.arg_names
    signature = {n: "constexpr" if n in known else types.get(n, "i32") for n in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in known}
    source = ASTSource(expand_kernel, signature, known, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    print(made.metadata.shared, "bar.sync" in made.asm["ptx"], "mma.sync" in made.asm["ptx"])
"""


@pytest.mark.skipif(DEVICE is not None, reason="compiles for a Hopper, whatever there is")
def test_compiled_for_a_gpu_nothing_goes_through_shared_memory(tmp_path: Path) -> None:
    """Catches a compiler that deals axes out in another order: right, and slow."""
    assert output_of_compiler(COMPILE, tmp_path).splitlines() == ["0 False True"] * 2
