"""The tiles of attention against plain sums, for every number of heads that share a key head."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="no numba on this machine")

from numba import njit
from numpy.typing import NDArray

from loramux.kernels.cpu_jit import attention_tiles as tiles
from loramux.kernels.cpu_jit.attention_tiles import MIX_WIDTH, TOKENS

Floats = NDArray[np.float32]
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def random(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def group_sizes(count: int) -> list[int]:
    sizes = []
    while sum(sizes) < count:
        sizes.append(int(tiles.heads_at(sum(sizes), count)))
    return sizes


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 12])
def test_groups_of_heads_end_where_the_heads_do(count: int) -> None:
    sizes = group_sizes(count)
    assert sum(sizes) == count
    assert all(1 <= size <= 4 for size in sizes)


@pytest.mark.parametrize("num_heads", sorted(set(group_sizes(4) + group_sizes(3) + [1, 2])))
@pytest.mark.parametrize("dim", [MIX_WIDTH, 4 * MIX_WIDTH])
def test_scores_are_dot_and_nothing_else_is_written(num_heads: int, dim: int) -> None:
    q, keys = random(num_heads, dim), random(TOKENS, dim + 24)
    scores = random(num_heads + 1, TOKENS + 3)
    expected = scores.copy()
    expected[:num_heads, :TOKENS] = q @ keys[:, :dim].T
    source = q.ctypes.data, keys.ctypes.data, keys.strides[0], dim
    tiles.score_tile(num_heads, (*source, scores.ctypes.data, scores.strides[0], keys.ctypes.data))
    np.testing.assert_allclose(scores, expected, **TOLERANCE)


@pytest.mark.parametrize("num_heads", sorted(set(group_sizes(4) + group_sizes(3) + [1, 2])))
@pytest.mark.parametrize("count", [0, 1, 5, 16])
def test_values_are_added_by_their_scores_and_nothing_else_is_written(
    num_heads: int, count: int
) -> None:
    scores, values = random(num_heads, 20), random(16, MIX_WIDTH + 8)
    sums = random(num_heads, 2 * MIX_WIDTH)
    expected = sums.copy()
    expected[:, :MIX_WIDTH] += scores[:, :count] @ values[:count, :MIX_WIDTH]
    sources = scores.ctypes.data, scores.strides[0], values.ctypes.data, values.strides[0]
    target = sums.ctypes.data, sums.strides[0]
    tiles.mix_tile(num_heads, (*sources, count, *target, values.ctypes.data))
    np.testing.assert_allclose(sums, expected, **TOLERANCE)


@njit
def largest(start: int, count: int) -> float:
    return tiles.largest(start, count)


@pytest.mark.parametrize("count", [1, 3, 4, 17, 64])
def test_the_largest_is_found_wherever_it_stands(count: int) -> None:
    values = random(count + 4)
    values[count:] = 100.0
    for place in range(count):
        values[place] += 10.0
        assert largest(values.ctypes.data, count) == values[place]
        values[place] -= 10.0
