"""Runs the parts of a load at once on several threads, or one after another on the calling one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """Starts work on the threads of an executor, in order; work may wait for earlier work."""

    def __init__(self, executor: Executor | None = None, *, num_threads: int = 1) -> None:
        """`executor`: its threads take work in order; None runs work on the calling thread."""
        self._executor = executor
        self.num_threads = num_threads

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start work and return a function that waits for its result, or raises its error."""
        if self._executor is None:
            result = work()
            return lambda: result
        return self._executor.submit(work).result

    def close(self) -> None:
        """Wait for running work; work that has not started is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


CALLING_THREAD = Workers()
