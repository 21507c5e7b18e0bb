"""Each tile is assigned to one CTA, and no CTA has two tiles more than another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora.work_item import (  # noqa: E402
    rank_after,
    rank_after_waves,
    tile_of_wave,
)


@triton.jit
def _take(times, owners, tile):
    tl.atomic_add(times + tile, 1)
    tl.store(owners + tile, tl.program_id(0))


@triton.jit
def _assign(times, owners, num_first, num_second, num_third):
    """Record how often each tile is assigned, and its CTA."""
    programs = tl.num_programs(0)
    for wave in tl.range(tl.cdiv(num_first, programs)):
        tile = tile_of_wave(wave)
        if tile < num_first:
            _take(times, owners, tile)
    rank = rank_after_waves(num_first)
    for second in tl.range(rank, num_second, programs):
        _take(times, owners, num_first + second)
    rank = rank_after(rank, num_second)
    for third in tl.range(rank, num_third, programs):
        _take(times, owners, num_first + num_second + third)


@given(
    num_programs=st.integers(1, 9),
    num_tiles=st.tuples(*[st.integers(0, 40)] * 3).filter(any),
)
def test_every_cta_gets_about_as_many_tiles(
    num_programs: int, num_tiles: tuple[int, int, int]
) -> None:
    times, owners = torch.zeros(2, sum(num_tiles), dtype=torch.int32)
    _assign[(num_programs,)](times, owners, *num_tiles)
    assert times.eq(1).all()
    counts = np.bincount(owners.cpu().numpy(), minlength=num_programs)
    assert len(counts) == num_programs
    assert counts.max() - counts.min() <= 1
