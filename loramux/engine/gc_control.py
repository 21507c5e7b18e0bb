"""Moves Python's full garbage collections out of the step loop into idle time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Protocol, Self

_NEVER = 2**31 - 1
# Python's default number of middle-generation collections before a full one.
_MIDDLE_COLLECTIONS = 10
# Counting allocated blocks takes time, so it is not done in every step.
_STEPS_BETWEEN_COUNTS = 1024
_GROWTH = 2


class Collector(Protocol):
    """The part of the gc module that FullCollections uses."""

    def collect(self) -> int: ...

    def freeze(self) -> None: ...

    def unfreeze(self) -> None: ...

    def get_count(self) -> tuple[int, int, int]: ...

    def get_threshold(self) -> tuple[int, int, int]: ...

    def set_threshold(self, first: int, second: int, third: int, /) -> None: ...


class FullCollections:
    """Disables automatic full collections in a step loop, which would take many steps' time.

    Objects of a step are freed by their reference counts, and collections of the young
    generations go on. A full collection runs when the engine is idle, or when the number of
    allocated blocks has doubled.
    """

    def __init__(
        self,
        *,
        owns_process: bool = False,
        collector: Collector = gc,
        count_blocks: Callable[[], int] = sys.getallocatedblocks,
    ) -> None:
        """`owns_process`: freeze all objects that exist when the context is entered."""
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
        """Collect if memory has doubled, so that a server that is never idle stays bounded."""
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_COUNTS:
            return
        if self._count_blocks() > _GROWTH * self._num_blocks:
            self._collect()

    def while_idle(self) -> None:
        """Collect if Python itself would have started a full collection by now."""
        if self._collector.get_count()[2] >= _MIDDLE_COLLECTIONS:
            self._collect()

    def _collect(self) -> None:
        self._collector.collect()
        self._num_blocks = self._count_blocks()
