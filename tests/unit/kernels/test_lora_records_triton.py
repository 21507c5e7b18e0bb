from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora.work_item import is_site_used, load_word, skip  # noqa: E402


@triton.jit
def _words(records, out, live):
    tl.store(out, load_word(records + 1))
    tl.store(out + 1, load_word(records + 1, live > 0))


@triton.jit
def _used(work, out, record_start, num_slices):
    tl.store(out, is_site_used(work, record_start, num_slices))


@triton.jit
def _skipped(out, begin, length):
    index = tl.arange(0, 8)
    tl.store(out + index, skip(index, (begin, length)))


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


def test_units_behind_a_gap_come_after_it() -> None:
    out = torch.full((8,), -1, dtype=torch.int32)
    _skipped[(1,)](out, 3, 20)
    assert out.tolist() == [0, 1, 2, 23, 24, 25, 26, 27]
