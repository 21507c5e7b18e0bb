"""How often an adapter is found in a cache, from how often each is asked for. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

MAX_STEPS = 100
PRECISION = 1e-9


def zipf_shares(num_adapters: int, exponent: float) -> Array:
    """Share of all requests that ask for the i-th most popular: ~ 1 / i ** exponent; 0: equal."""
    weights: Array = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    shares: Array = weights / weights.sum()
    return shares


def num_kept(sizes: Array, capacity: float) -> int:
    """How many of the most popular fit, in order of popularity."""
    return int(np.searchsorted(np.cumsum(sizes), capacity, side="right"))


def ideal_hit_rate(shares: Array, sizes: Array, capacity: float) -> float:
    """Of a cache that knows the popularities and keeps the most popular."""
    return float(shares[: num_kept(sizes, capacity)].sum())


def lru_hit_rate(shares: Array, sizes: Array, capacity: float) -> float:
    """Che's approximation for independent requests.

    An item stays as long as it is asked for again within a time T that is the same for all;
    T is such that what is expected to be there fills the cache.
    """
    kept = num_kept(sizes, capacity)
    if kept == len(sizes):
        return 1.0
    filled = float(sizes[:kept].sum())
    time = 0.0
    # What is there is a concave function of T: Newton's steps from below never go too far.
    for _ in range(MAX_STEPS):
        absent = np.exp(-shares * time)
        missing = filled - float((1 - absent) @ sizes)
        if missing <= PRECISION * filled:
            break
        time += missing / float((shares * absent) @ sizes)
    return float((1 - np.exp(-shares * time)) @ shares)
