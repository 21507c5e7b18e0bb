"""The phases of an engine's start, some of which run at the same time on several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Progress = Callable[[str, float], None]


class StartPhases:
    """Measures each phase, and reports those that run now as one text and one share.

    A thread has one phase at a time: the next one ends the one before.
    """

    def __init__(
        self, report: Progress | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[int, tuple[str, float, float]] = {}
        self._seconds: dict[str, float] = {}

    def __call__(self, what: str, share: float) -> None:
        """Begin a phase of the calling thread, or go on with it; a share of 1 ends it."""
        with self._lock:
            thread, now = threading.get_ident(), self._clock()
            before = self._running.get(thread)
            if before is not None and before[0] != what:
                self._end(thread, now)
                before = None
            began = now if before is None else before[1]
            self._running[thread] = (what, began, share)
            texts = dict.fromkeys(phase for phase, _, _ in self._running.values())
            shares = [done for _, _, done in self._running.values()]
            if share >= 1:
                self._end(thread, now)
        if self._report is not None:
            self._report(", ".join(texts), sum(shares) / len(shares))

    def seconds(self) -> dict[str, float]:
        """End all phases, and return the seconds of each in the order of their ends."""
        with self._lock:
            for thread in list(self._running):
                self._end(thread, self._clock())
            return dict(self._seconds)

    def _end(self, thread: int, now: float) -> None:
        what, began, _ = self._running.pop(thread)
        self._seconds[what] = self._seconds.get(what, 0.0) + now - began
