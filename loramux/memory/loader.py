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

from loramux.adapters.packed.image import AdapterImage, Allocate, mapped_buffer
from loramux.errors import LoramuxError
from loramux.memory.disk_tier import DiskTier
from loramux.memory.pace import Pace
from loramux.memory.tiers import AdapterState

_NICENESS = 19
_NUM_THREADS = 2
# For so long a thread may keep the interpreter from another one that wants it. Python's own 5 ms
# are a twentieth of a step on a small CPU, and a step asks hundreds of times.
_SWITCH_INTERVAL_S = 0.0005


# Into these pages, from this byte on, these bytes.
WriteSlice = Callable[[list[int], int, memoryview], None]


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
        write_slice: WriteSlice | None = None,
        allocate: Allocate = mapped_buffer,
        executor: Executor | None = None,
    ) -> None:
        """`write_slice`: where pages can be filled with parts of an image, while it is read.

        That is where steps run on the cores that loads need, too.
        """
        self._source = source
        self._disk = disk
        self._write_pages = write_pages
        self._write_slice = write_slice
        self._pace = Pace()
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
            arrived.append(self._await_one(timeout_s) if timeout_s else self._next())
            while True:
                arrived.append(self._next())
        except queue.Empty:
            self.num_open -= len(arrived)
            return arrived

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> Arrival:
        return self._arrived.get_nowait()

    def _await_one(self, timeout_s: float) -> Arrival:
        with self._pace.awaited():
            return self._arrived.get(timeout=timeout_s)

    def _read(self, cid: str, page_ids: list[int]) -> None:
        began = time.perf_counter()
        try:
            image, is_written = self._read_disk(cid, page_ids)
            found = AdapterState.DISK
            if image is None:
                image, found = self._source.read(cid), AdapterState.SOURCE
            read_s = time.perf_counter() - began
            if page_ids and not is_written:
                self._write_pages(page_ids, image)
            copy_s = time.perf_counter() - began - read_s
        except Exception as error:  # whoever waits for this adapter must hear of it
            self._arrived.put(Arrival(cid=cid, error=_as_loramux_error(error)))
            return
        self._arrived.put(Arrival(cid=cid, image=image, found=found, read_s=read_s, copy_s=copy_s))
        if self._disk is not None and found is AdapterState.SOURCE:
            self._disk.put(image)

    def _read_disk(self, cid: str, page_ids: list[int]) -> tuple[AdapterImage | None, bool]:
        """The image, if it is there and right, and whether its pages are filled as well."""
        if self._disk is None:
            return None, False
        write_slice, pace = self._write_slice, self._pace
        if write_slice is None:
            return self._disk.read(cid, self._allocate), False

        def pass_on(start: int, data: memoryview, *, is_last: bool) -> None:
            if page_ids:
                write_slice(page_ids, start, data)
            if not is_last:
                pace.pause()

        pace.begin()
        image = self._disk.read(cid, self._allocate, pass_on)
        return image, image is not None

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
