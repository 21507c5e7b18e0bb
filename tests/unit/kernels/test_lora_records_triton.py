from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loramux.kernels.lora_records_triton import is_site_used, load_group, load_word  # noqa: E402


@triton.jit
def _words(records, out, live):
    tl.store(out, load_word(records + 1))
    tl.store(out + 1, load_word(records + 1, live > 0))


@triton.jit
def _used(work, out, record_start, num_slices):
    tl.store(out, is_site_used(work, record_start, num_slices))


@triton.jit
def _group(pool, out, address, ranks, first, width):
    block = load_group(pool, address + tl.arange(0, 1), ranks, first, width, 16)
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, block)


@pytest.mark.parametrize(("live", "expected"), [(1, 7), (0, 0)])
def test_a_word_of_nothing_is_zero(live: int, expected: int) -> None:
    out = torch.full((2,), -1, dtype=torch.int32)
    _words[(1,)](torch.tensor([3, 7], dtype=torch.int32), out, live)
    assert out.tolist() == [7, expected]


@pytest.mark.parametrize(
    ("first_projection", "num_slices", "expected"), [(0, 3, 0), (3, 1, 1), (2, 2, 1), (4, 2, 0)]
)
def test_a_site_is_used_if_one_of_its_projections_is(
    first_projection: int, num_slices: int, expected: int
) -> None:
    work = torch.zeros(16, dtype=torch.int32)
    work[4 + 3] = 1
    out = torch.full((1,), -1, dtype=torch.int32)
    # Records of the second layer: 8 words for each of 8 projections of a unit.
    _used[(1,)](work, out, 64 * 5 + first_projection * 8, num_slices)
    assert out.item() == expected


def test_a_group_has_zeros_for_ranks_and_columns_that_it_does_not_have() -> None:
    pool = torch.arange(1.0, 257.0)
    out = torch.full((16, 16), -1.0)
    _group[(1,)](pool, out, 1, 3, 16, 20)
    expected = torch.zeros(16, 16)
    expected[:3, :4] = pool[64 : 64 + 60].view(3, 20)[:, 16:]
    assert torch.equal(out, expected)
