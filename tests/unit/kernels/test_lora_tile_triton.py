from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora.expand_mma import TILE_ROWS, sum_tile, tile_places  # noqa: E402
from loramux.kernels.gpu.lora.mma_layout import load_ordered_b  # noqa: E402

pytestmark = pytest.mark.usefixtures("both_orders")
MAX_SPLITS = 4


@triton.jit
def _sum(  # noqa: PLR0913
    y, b_ptr, records, partials, out, num_rows, ranks, weight, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, SMALL_SPLITS: tl.constexpr, SMALL_ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    group = tl.full((), 0, tl.int64), ranks, tl.full((), 1, tl.int32), weight
    b = load_ordered_b(b_ptr, group, 0, WIDTH, WIDTH, 1, 4)
    row, column, inside = tile_places(num_rows, 0, WIDTH, 1, 4)
    values = tl.load(y + row * WIDTH + column, mask=inside, other=0.0)
    total = sum_tile(
        values, b, group, (0, 0), b_ptr, records, partials, num_rows, 0, WIDTH,
        1, 4, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS,
    )  # fmt: skip
    tl.store(out + row * WIDTH + column, total, mask=inside)


@pytest.mark.parametrize(("num_rows", "splits"), [(3, 2), (4, 2), (5, 4), (TILE_ROWS, 4)])
def test_small_tiles_have_parts_of_their_own_number(num_rows: int, splits: int) -> None:
    """Parts that nobody wrote, other rows and other ranks are no numbers."""
    width, ranks = 24, 10
    partials = torch.full((TILE_ROWS + 2, 3, MAX_SPLITS, 16), torch.nan)
    # Of all 16 ranks, as a shrink writes them.
    partials[1 : 1 + num_rows, 0, :splits] = torch.randn(num_rows, splits, 16)
    b, y = torch.randn(ranks, width), torch.randn(num_rows, width)
    out = torch.zeros(num_rows, width)
    tensors = (y, b, torch.zeros(8, dtype=torch.int32), partials, out)
    _sum[(1,)](*tensors, num_rows, ranks, 0.5, width, 4, 2, 4, MAX_SPLITS, num_warps=1)
    h = partials[1 : 1 + num_rows, 0, :splits].sum(1)[:, :ranks] * 0.5
    torch.testing.assert_close(out, y + h @ b, atol=1e-5, rtol=1e-5)
