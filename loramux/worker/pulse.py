"""Counters in memory that an engine process and its server share."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Self

_NUM_COUNTERS = 2
_BYTES = 8 * _NUM_COUNTERS
_BEATS, _MARKS = range(_NUM_COUNTERS)


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters at one moment."""

    beats: int
    """How often the heartbeat thread has run."""
    marks: int
    """Beginnings and ends of steps."""

    @property
    def is_in_step(self) -> bool:
        return self.marks % 2 == 1

    @property
    def num_steps(self) -> int:
        """Steps that have begun."""
        return (self.marks + 1) // 2


class Pulse:
    """What the engine process has done so far; it writes, and the server reads.

    The server reads it without the help of the engine, whatever the state of its threads.
    """

    def __init__(self, file_number: int) -> None:
        """`file_number`: the descriptor of a file of `create`; it may be closed afterwards."""
        self._counters = memoryview(mmap.mmap(file_number, _BYTES)).cast("q")

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Return a new pulse, and the descriptor of its file for the process that writes it."""
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("loramux-pulse")
        else:
            with tempfile.TemporaryFile() as file:
                number = os.dup(file.fileno())
        os.ftruncate(number, _BYTES)
        return cls(number), number

    @property
    def counts(self) -> Counts:
        return Counts(self._counters[_BEATS], self._counters[_MARKS])

    def beat(self) -> None:
        self._counters[_BEATS] += 1

    def begin_step(self) -> None:
        self._counters[_MARKS] += 1

    def end_step(self) -> None:
        self._counters[_MARKS] += 1
