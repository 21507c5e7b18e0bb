"""Pools of threads for blocking work, one for each kind, so that a slow kind delays no other.

asyncio's own executor is left to the parsing of requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
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
        """Run the work on one of the threads; raise EngineBusy if too much waits for them."""
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


class Turns:
    """Work of one key after another, so that no key takes more than one of the threads."""

    def __init__(self, threads: WorkThreads, *, max_waiting: int = 256) -> None:
        """`max_waiting`: limit of what waits for one key."""
        self._threads = threads
        self._max_waiting = max_waiting
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    async def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Run the work when it is its turn; raise EngineBusy if too much waits for it."""
        lock, num_users = self._locks.get(key) or (asyncio.Lock(), 0)
        if num_users > self._max_waiting:
            raise EngineBusy(f"{num_users} requests wait for the tokenizer of this adapter.")
        self._locks[key] = lock, num_users + 1
        try:
            await lock.acquire()
        except BaseException:
            self._leave(key)
            raise
        task = asyncio.ensure_future(self._threads.run(work))
        task.add_done_callback(lambda done: self._end(key, lock, done))
        # The thread works on for a caller that is gone, and its turn lasts as long.
        return await asyncio.shield(task)

    def _end(self, key: Hashable, lock: asyncio.Lock, done: asyncio.Future[T]) -> None:
        lock.release()
        self._leave(key)
        # Reading the exception keeps asyncio from reporting it if no caller is left.
        if not done.cancelled():
            done.exception()

    def _leave(self, key: Hashable) -> None:
        lock, num_users = self._locks.pop(key)
        if num_users > 1:
            self._locks[key] = lock, num_users - 1


FETCHES = WorkThreads("fetches", 4, max_waiting=32)
"""Pushes, whose sources may be as slow as their limits allow."""
STORE_READS = WorkThreads("store reads", 8)
"""Adapters of this server's own store, which come from its bucket on first use."""
FOLDER_READS = WorkThreads("folder reads", 4)
"""Folders of adapters and combinations on this machine."""
TOKENIZER_READS = WorkThreads("tokenizer reads", 4)
"""Tokenizer files of adapters, which other processes read."""
QUERIES = WorkThreads("queries", 8)
"""Reads and writes of the registry's database."""
PLANS = WorkThreads("plans", 1, max_waiting=16)
GRAMMAR_CHECKS = WorkThreads("grammar checks", 16, max_waiting=256)
"""Grammars of requests; new ones wait for the processes that check them, known ones do not."""
ADAPTER_TEXTS = Turns(WorkThreads("adapter texts", 8))
"""Texts of adapters with a tokenizer or a template of their own, which other processes work on."""
