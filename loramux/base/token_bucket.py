"""A limit over time that refills at a constant rate."""

from __future__ import annotations

import math
from collections.abc import Callable

Clock = Callable[[], float]


class TokenBucket:
    """Holds what may still be used; it is full at first.

    It may fall below 0 by what was used beyond what was asked for.
    """

    def __init__(self, capacity: float, per_second: float, clock: Clock) -> None:
        self._capacity = float(capacity)
        self._per_second = per_second
        self._clock = clock
        self._level = self._capacity
        self._at = clock()

    @property
    def capacity(self) -> float:
        return self._capacity

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount, which may be negative, whether or not the bucket holds it."""
        self._level = min(self._capacity, self.level - amount)

    def try_take(self, amount: float = 1) -> bool:
        """Take the amount if the bucket holds it, and returns whether it does."""
        if self.level < amount:
            return False
        self._level -= amount
        return True

    def wait_s(self, amount: float) -> float:
        """Return the seconds until the bucket holds the amount; infinite if it never will."""
        missing = amount - self.level
        if missing <= 0:
            return 0.0
        if amount > self._capacity:
            return math.inf
        return missing / self._per_second

    def resize(self, capacity: float, per_second: float) -> None:
        """Change the limit; what was used stays used."""
        self._level = self.level + capacity - self._capacity
        self._capacity, self._per_second = float(capacity), per_second
