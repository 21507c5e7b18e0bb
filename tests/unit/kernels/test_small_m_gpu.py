"""Small-M GEMM in Triton's interpreter, against torch.

The interpreter's matrix product is wrong for bfloat16, so tiles are checked in it on a GPU alone
(tests/gpu/kernel_check.py).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.gemm import small_m
from loramux.kernels.gpu.gemm.small_m import LAUNCHES, MAX_ROWS  # noqa: E402

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
VECTOR_ROWS = max(launch.max_rows for launch in LAUNCHES if launch.num_stages is None)
CASES = [
    (dtype, num_rows)
    for dtype in LIMITS
    for num_rows in (1, 2, 3, 16, 17, MAX_ROWS)
    if dtype != torch.bfloat16 or num_rows <= VECTOR_ROWS
]
# (outputs, inputs): whole blocks, and neither a multiple of any.
SHAPES = [(64, 128), (70, 200), (3, 16), (5, 2100)]


@pytest.mark.parametrize(("dtype", "num_rows"), CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_m_gemm_equals_torch(
    shape: tuple[int, int], dtype: torch.dtype, num_rows: int
) -> None:
    num_outputs, num_inputs = shape
    x = torch.randn(num_rows, num_inputs).to(dtype)
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    room = torch.full((num_rows + 1, num_outputs), 7.0, dtype=dtype)
    small_m.gemm(x, weight, room[:num_rows])
    expected = x.double() @ weight.double().t()
    limit = LIMITS[dtype]
    torch.testing.assert_close(room[:num_rows].double(), expected, atol=limit, rtol=limit)
    assert (room[num_rows:] == 7.0).all()


def test_launches_are_in_the_order_of_their_rows() -> None:
    most = [launch.max_rows for launch in LAUNCHES]
    assert most == sorted(most) and most[-1] == MAX_ROWS
