"""Threads that bring adapters from disk or source to host memory, and on into their pages."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from loramux.adapters.image import AdapterImage, mapped_buffer
from loramux.adapters.image_file import Allocate
from loramux.errors import LoramuxError
from loramux.memory.disk_tier import DiskTier
from loramux.memory.tiers import AdapterState

_NICENESS = 19
_NUM_THREADS = 2
# For so long a thread may keep the interpreter from another one that wants it. Python's own 5 ms
# are a twentieth of a step on a small CPU, and a step asks hundreds of times.
_SWITCH_INTERVAL_S = 0.0005


class ImageSource(Protocol):
    def read(self, cid: str) -> AdapterImage:
        """Reads and checks the adapter where it came from."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How one load ended."""

    cid: str
    image: AdapterImage | None = None
    error: LoramuxError | None = None
    found: AdapterState = AdapterState.HOST
    read_s: float = 0.0
    copy_s: float = 0.0


class AdapterLoader:
    """Jobs go in from the step loop, arrivals come out there; nothing here waits for a step."""

    def __init__(
        self,
        *,
        source: ImageSource,
        disk: DiskTier | None,
        write_pages: Callable[[list[int], AdapterImage], None],
        allocate: Allocate = mapped_buffer,
        executor: Executor | None = None,
    ) -> None:
        self._source = source
        self._disk = disk
        self._write_pages = write_pages
        self._allocate = allocate
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._threads = executor or ThreadPoolExecutor(
            max_workers=_NUM_THREADS, thread_name_prefix="loader", initializer=step_back
        )
        self.max_open = 2 * _NUM_THREADS
        self.num_open = 0

    def read(self, cid: str, page_ids: Sequence[int]) -> None:
        """To host memory, and into the pages if there are any."""
        self.num_open += 1
        self._threads.submit(self._read, cid, list(page_ids))

    def copy(self, image: AdapterImage, page_ids: Sequence[int]) -> None:
        self.num_open += 1
        self._threads.submit(self._copy, image, list(page_ids))

    def arrivals(self, *, timeout_s: float = 0.0) -> list[Arrival]:
        """What has come in; with a timeout, waits that long for a first one."""
        arrived: list[Arrival] = []
        try:
            arrived.append(self._arrived.get(timeout=timeout_s) if timeout_s else self._next())
            while True:
                arrived.append(self._next())
        except queue.Empty:
            self.num_open -= len(arrived)
            return arrived

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> Arrival:
        return self._arrived.get_nowait()

    def _read(self, cid: str, page_ids: list[int]) -> None:
        began = time.perf_counter()
        try:
            image = None if self._disk is None else self._disk.read(cid, self._allocate)
            found = AdapterState.DISK
            if image is None:
                image, found = self._source.read(cid), AdapterState.SOURCE
            read_s = time.perf_counter() - began
            if page_ids:
                self._write_pages(page_ids, image)
            copy_s = time.perf_counter() - began - read_s
        except Exception as error:  # whoever waits for this adapter must hear of it
            self._arrived.put(Arrival(cid=cid, error=_as_loramux_error(error)))
            return
        self._arrived.put(Arrival(cid=cid, image=image, found=found, read_s=read_s, copy_s=copy_s))
        if self._disk is not None and found is AdapterState.SOURCE:
            self._disk.put(image)

    def _copy(self, image: AdapterImage, page_ids: list[int]) -> None:
        began = time.perf_counter()
        try:
            self._write_pages(page_ids, image)
        except Exception as error:  # whoever waits for this adapter must hear of it
            self._arrived.put(Arrival(cid=image.cid, error=_as_loramux_error(error)))
            return
        seconds = time.perf_counter() - began
        self._arrived.put(Arrival(cid=image.cid, image=image, copy_s=seconds))


def _as_loramux_error(error: Exception) -> LoramuxError:
    if isinstance(error, LoramuxError):
        return error
    return LoramuxError(f"The adapter could not be loaded: {error!r}. Try again.")


def step_back() -> None:
    """This thread, and those that it starts, run while the step loop leaves a core idle.

    Niceness alone does not do it: a thread that wakes up still waits for the other's slice to end,
    and a step has hundreds of such moments. An idle thread is interrupted at once, and gives the
    interpreter back soon.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
    if sys.platform == "linux":
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, _NICENESS)
        # Some sandboxes know no other policy; there niceness has to do.
        with suppress(OSError):
            os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
