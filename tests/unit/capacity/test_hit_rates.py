from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.capacity.planner import ideal_hit_rate, lru_hit_rate, num_kept, zipf_shares


def simulated_lru(shares: np.ndarray, sizes: np.ndarray, capacity: float) -> float:
    """Hit rate of a real LRU cache, once it is warm."""
    cache: OrderedDict[int, None] = OrderedDict()
    used, num_hits, num_warm = 0.0, 0, 4000
    asked = np.random.default_rng(7).choice(len(shares), size=24_000, p=shares)
    for step, item in enumerate(asked.tolist()):
        is_hit = item in cache
        num_hits += is_hit and step >= num_warm
        if not is_hit:
            used += sizes[item]
        cache[item] = None
        cache.move_to_end(item)
        while used > capacity:
            oldest, _ = cache.popitem(last=False)
            used -= sizes[oldest]
    return num_hits / (len(asked) - num_warm)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_approximation_agrees_with_a_simulated_cache(exponent: float) -> None:
    shares, sizes = zipf_shares(120, exponent), np.ones(120)
    assert lru_hit_rate(shares, sizes, 30) == pytest.approx(
        simulated_lru(shares, sizes, 30), abs=0.015
    )


def test_approximation_counts_true_sizes() -> None:
    """Catches a cache that is measured in adapters where it holds bytes."""
    shares, sizes = zipf_shares(200, 1.0), np.resize([8.0, 16.0, 32.0, 64.0], 200)
    expected = simulated_lru(shares, sizes, 1500)
    assert lru_hit_rate(shares, sizes, 1500) == pytest.approx(expected, abs=0.02)


def test_shares_fall_off_by_their_exponent() -> None:
    shares = zipf_shares(10, 2.0)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] / shares[3] == pytest.approx(16)
    assert set(zipf_shares(4, 0.0)) == {0.25}


@given(
    num=st.integers(1, 400),
    exponent=st.floats(0, 10),
    ranks=st.lists(st.integers(1, 512), min_size=1, max_size=5),
    room=st.floats(0, 1.2),
)
def test_rates_stay_between_none_and_all(
    num: int, exponent: float, ranks: list[int], room: float
) -> None:
    shares, sizes = zipf_shares(num, exponent), np.resize(np.array(ranks, dtype=float), num)
    capacity = room * float(sizes.sum())
    kept = num_kept(sizes, capacity)
    ideal, lru = ideal_hit_rate(shares, sizes, capacity), lru_hit_rate(shares, sizes, capacity)
    assert sizes[:kept].sum() <= capacity or kept == 0
    assert 0 <= lru <= 1 + 1e-9 and 0 <= ideal <= 1 + 1e-9
    if kept == num:
        assert lru == 1
    if len(set(ranks)) == 1:
        assert lru <= ideal + 1e-6
