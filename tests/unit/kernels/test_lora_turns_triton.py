"""Tiles are dealt out: each to one program, and to none two more than to another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora.tile_schedule import (  # noqa: E402
    place_behind,
    place_behind_turns,
    tile_of_turn,
)


@triton.jit
def _take(times, owners, tile):
    tl.atomic_add(times + tile, 1)
    tl.store(owners + tile, tl.program_id(0))


@triton.jit
def _deal(times, owners, num_first, num_second, num_third):
    """How often each tile is dealt out, and to whom."""
    programs = tl.num_programs(0)
    for turn in tl.range(tl.cdiv(num_first, programs)):
        tile = tile_of_turn(turn)
        if tile < num_first:
            _take(times, owners, tile)
    place = place_behind_turns(num_first)
    for second in tl.range(place, num_second, programs):
        _take(times, owners, num_first + second)
    place = place_behind(place, num_second)
    for third in tl.range(place, num_third, programs):
        _take(times, owners, num_first + num_second + third)


@given(
    num_programs=st.integers(1, 9),
    num_tiles=st.tuples(*[st.integers(0, 40)] * 3).filter(any),
)
def test_every_program_gets_about_as_many(
    num_programs: int, num_tiles: tuple[int, int, int]
) -> None:
    times, owners = torch.zeros(2, sum(num_tiles), dtype=torch.int32)
    _deal[(num_programs,)](times, owners, *num_tiles)
    assert times.eq(1).all()
    counts = np.bincount(owners.cpu().numpy(), minlength=num_programs)
    assert len(counts) == num_programs
    assert counts.max() - counts.min() <= 1
