"""When Python looks through all objects for cycles: while nothing runs, not between two steps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Protocol, Self

# Python's own limit of collections of the middle generation before one of all objects.
_NEVER = 2**31 - 1
_ENOUGH = 10
# Counting blocks is not free either.
_STEPS_BETWEEN_COUNTS = 1024
_GROWTH = 2


class Collector(Protocol):
    """The part of the gc module that is used here."""

    def collect(self) -> int: ...

    def freeze(self) -> None: ...

    def unfreeze(self) -> None: ...

    def get_count(self) -> tuple[int, int, int]: ...

    def get_threshold(self) -> tuple[int, int, int]: ...

    def set_threshold(self, first: int, second: int, third: int, /) -> None: ...


class FullCollections:
    """Around a step loop: a search through all objects would stop it for many steps' time.

    What dies in a step dies by its reference count; young cycles are found as ever. All objects
    are looked through when the engine is idle, and in between only when memory has doubled.
    """

    def __init__(
        self,
        *,
        owns_process: bool = False,
        collector: Collector = gc,
        count_blocks: Callable[[], int] = sys.getallocatedblocks,
    ) -> None:
        """`owns_process`: what there is at the start stays to the end, and is not looked at."""
        self._owns_process = owns_process
        self._collector = collector
        self._count_blocks = count_blocks
        self._threshold = (0, 0, 0)
        self._num_blocks = 0
        self._num_steps = 0

    def __enter__(self) -> Self:
        self._threshold = self._collector.get_threshold()
        first, second, _ = self._threshold
        self._collector.set_threshold(first, second, _NEVER)
        if self._owns_process:
            self._collector.collect()
            self._collector.freeze()
        self._num_blocks = self._count_blocks()
        return self

    def __exit__(self, *exception: object) -> None:
        self._collector.set_threshold(*self._threshold)
        if self._owns_process:
            self._collector.unfreeze()

    def after_step(self) -> None:
        """A server that is never idle must not grow without bound."""
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_COUNTS:
            return
        if self._count_blocks() > _GROWTH * self._num_blocks:
            self._collect()

    def while_idle(self) -> None:
        """Nobody waits: now, if as much is new as Python itself would have waited for."""
        if self._collector.get_count()[2] >= _ENOUGH:
            self._collect()

    def _collect(self) -> None:
        self._collector.collect()
        self._num_blocks = self._count_blocks()
