"""Both twins: one makes numbers of words, the other operands of a matrix product."""

from __future__ import annotations

import pytest
import torch

from loramux.adapters.packed.fp12 import pack_fp12
from loramux.kernels.reference.fp12 import read_fp12, unpack_fp12

triton = pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora import fp12 as fast
from loramux.kernels.gpu.pdl import axis  # noqa: E402

pytestmark = pytest.mark.usefixtures("both_orders")


def random_words(num_rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(num_rows, width, generator=generator) / 4
    rows[rows.abs() < 0.05] /= 2**14
    return pack_fp12(rows.clamp(-1.9, 1.9).to(torch.bfloat16))


@triton.jit
def _lengthen(words, out, IN: tl.constexpr, BLOCKS: tl.constexpr, LANES_FIRST: tl.constexpr):
    column = axis(4, 0, 4, LANES_FIRST) * (BLOCKS * 128) + axis(128, 3, 4, LANES_FIRST)
    column += axis(BLOCKS, 2, 4, LANES_FIRST) * 128
    at = words + axis(2, 1, 4, LANES_FIRST) * (3 * IN) + column
    planes = fast.load_planes(at, IN, column < IN, "")
    weights = fast.unpack_fp12(planes, 4, 2, BLOCKS, False)
    row = tl.arange(0, 16)[None, :, None]
    width: tl.constexpr = BLOCKS * 128
    column = tl.arange(0, 4)[:, None, None] * width + tl.arange(0, width)[None, None, :]
    tl.store(out + row * IN + column, weights * fast.FP12_SCALE, mask=column < IN)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("missing", [0, 128])
def test_the_operand_has_the_numbers_of_the_words(blocks: int, missing: int) -> None:
    width = 512 * blocks - missing
    words = random_words(16, width)
    out = torch.full((16, width), float("nan"))
    _lengthen[(1,)](words, out, width, blocks, fast.LANES_FIRST.value)
    assert torch.equal(out, unpack_fp12(words))
    assert out.abs().max() > 0.5


def test_rows_are_read_from_their_place_in_a_pool() -> None:
    words = random_words(11, 256)
    pool = torch.full((3, 4096 + 64), float("nan"), dtype=torch.bfloat16)
    form = words.view(torch.bfloat16).flatten()
    pool.view(-1)[192 : 192 + form.numel()] = form
    assert torch.equal(read_fp12(pool, 192, 11, 256), unpack_fp12(words)[:11])
