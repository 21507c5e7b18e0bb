"""Pools of threads for blocking work, one for each kind, so that a slow kind delays no other.

asyncio's own executor is left to the parsing of requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from loramux.errors import EngineBusy

P = ParamSpec("P")
T = TypeVar("T")


class WorkThreads:
    """A pool of threads for one kind of work, with a limit of what waits for them."""

    def __init__(self, name: str, num_threads: int, *, max_waiting: int = 1024) -> None:
        """`name` is the plural of what they do, in names of threads and in messages."""
        self._name = name
        self._limit = num_threads + max_waiting
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._num_open = 0

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the work on one of the threads; raises EngineBusy if too much waits for them."""
        with self._lock:
            if self._num_open >= self._limit:
                raise EngineBusy(f"{self._num_open} {self._name} are under way or wait already.")
            self._num_open += 1
        try:
            future = self._executor.submit(work, *args, **kwargs)
        except BaseException:
            self._end()
            raise
        future.add_done_callback(self._end)
        return await asyncio.wrap_future(future)

    @property
    def num_open(self) -> int:
        """What runs or waits now."""
        return self._num_open

    def _end(self, future: Future[T] | None = None) -> None:
        with self._lock:
            self._num_open -= 1


FETCHES = WorkThreads("fetches", 4, max_waiting=32)
"""Pushes, whose sources may be as slow as their limits allow."""
STORE_READS = WorkThreads("store reads", 8)
"""Adapters of this server's own store, which come from its bucket on first use."""
FOLDER_READS = WorkThreads("folder reads", 4)
"""Folders of adapters and combinations on this machine."""
QUERIES = WorkThreads("queries", 8)
"""Reads and writes of the registry's database."""
PLANS = WorkThreads("plans", 1, max_waiting=16)
GRAMMAR_CHECKS = WorkThreads("grammar checks", 16, max_waiting=256)
"""Grammars of requests; new ones wait for the processes that check them, known ones do not."""
