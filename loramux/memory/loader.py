"""Loader threads: read adapters from disk or source into host memory and copy them into pages."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from loramux.adapters.packed.image import AdapterImage, Allocate, mapped_buffer
from loramux.adapters.workers import CALLING_THREAD, Workers
from loramux.errors import LoramuxError, machine_error
from loramux.memory.disk_tier import DiskTier
from loramux.memory.tiers import AdapterState

_log = logging.getLogger(__name__)
_NICENESS = 19
_NUM_THREADS = 2
# Threads that take parts of a load on a machine whose steps run on a GPU.
_MAX_WORKERS = 4
# How long a thread may hold the GIL while another waits for it. The default of 5 ms is a twentieth
# of a step on a small CPU, and a step takes the GIL hundreds of times.
_SWITCH_INTERVAL_S = 0.0005
# Seconds of sleep for each second of work, while steps run on the same cores. With this value a
# load of 20 MiB takes about four steps of a small model on two cores.
SLEEP_FACTOR = 6.0

# (page ids, offset of the first byte, bytes)
WriteSlice = Callable[[list[int], int, memoryview], None]


class ImageSource(Protocol):
    def read(self, cid: str) -> AdapterImage:
        """Read, check and pack the adapter from the folder it was registered with."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of one load: an image, or the error that ended it."""

    cid: str
    image: AdapterImage | None = None
    error: LoramuxError | None = None
    found: AdapterState = AdapterState.HOST
    read_s: float = 0.0
    copy_s: float = 0.0


class LoadThrottle:
    """Makes loader threads sleep after each slice of work, to limit their effect on steps.

    Even a load on an otherwise idle core delays the step loop: the core has to be preempted, and
    the GIL taken back.
    """

    def __init__(
        self,
        sleep_factor: float = SLEEP_FACTOR,
        *,
        worked_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`worked_s` returns the CPU time of the calling thread."""
        self._sleep_factor = sleep_factor
        self._worked_s = worked_s
        self._sleep = sleep
        self._is_off = False
        self._threads = threading.local()
        # Held during a sleep, so that the threads do not work at the same time.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start to measure the calling thread's work."""
        self._threads.worked_s = self._worked_s()

    def pause(self) -> None:
        """Sleeps in proportion to the calling thread's work since the last begin() or pause()."""
        if self._is_off:
            return
        with self._lock:
            self._sleep(self._sleep_factor * (self._worked_s() - self._threads.worked_s))
        self.begin()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turn the throttle off while the step loop only waits for loads."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False


class AdapterLoader:
    """Takes jobs from the step loop and hands results back to it; it never waits for a step."""

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
        """Create a loader.

        `write_slice` fills pages with parts of an image while it is read. It is given where steps
        run on the same cores as loads, that is on a CPU. `executor`: None for threads of its own.
        """
        self._source = source
        self._disk = disk
        self._write_pages = write_pages
        self._write_slice = write_slice
        self._throttle = LoadThrottle()
        self._allocate = allocate
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._threads = executor or ThreadPoolExecutor(
            max_workers=_NUM_THREADS, thread_name_prefix="loader", initializer=lower_priority
        )
        self.max_active = 2 * _NUM_THREADS
        self.num_active = 0

    def read(self, cid: str, page_ids: Sequence[int]) -> None:
        """Start to read an adapter into host memory, and into its pages if it has any."""
        self.num_active += 1
        self._threads.submit(self._read, cid, list(page_ids))

    def copy(self, image: AdapterImage, page_ids: Sequence[int]) -> None:
        """Start to copy an image from host memory into pages."""
        self.num_active += 1
        self._threads.submit(self._copy, image, list(page_ids))

    def run(self, work: Callable[[], None]) -> None:
        """Run work without a result on a loader thread."""
        self._threads.submit(work)

    def results(self, *, timeout_s: float = 0.0) -> list[LoadResult]:
        """Return the loads that have ended; wait up to timeout_s for the first one."""
        results: list[LoadResult] = []
        try:
            results.append(self._wait_for_one(timeout_s) if timeout_s else self._next())
            while True:
                results.append(self._next())
        except queue.Empty:
            self.num_active -= len(results)
            return results

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> LoadResult:
        return self._results.get_nowait()

    def _wait_for_one(self, timeout_s: float) -> LoadResult:
        with self._throttle.off():
            return self._results.get(timeout=timeout_s)

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
        except Exception as error:  # reported to the requests that wait for it
            self._results.put(LoadResult(cid=cid, error=_as_loramux_error(error, cid)))
            return
        self._results.put(
            LoadResult(cid=cid, image=image, found=found, read_s=read_s, copy_s=copy_s)
        )
        if self._disk is not None and found is AdapterState.SOURCE:
            self._disk.put(image)

    def _read_disk(self, cid: str, page_ids: list[int]) -> tuple[AdapterImage | None, bool]:
        """Return the image, if the disk tier has it, and whether its pages are filled as well."""
        if self._disk is None:
            return None, False
        write_slice, throttle = self._write_slice, self._throttle
        if write_slice is None:
            return self._disk.read(cid, self._allocate), False

        def pass_on(start: int, data: memoryview, *, is_last: bool) -> None:
            if page_ids:
                write_slice(page_ids, start, data)
            if not is_last:
                throttle.pause()

        throttle.begin()
        image = self._disk.read(cid, self._allocate, pass_on)
        return image, image is not None

    def _copy(self, image: AdapterImage, page_ids: list[int]) -> None:
        began = time.perf_counter()
        try:
            self._write_pages(page_ids, image)
        except Exception as error:  # reported to the requests that wait for it
            self._results.put(LoadResult(cid=image.cid, error=_as_loramux_error(error, image.cid)))
            return
        seconds = time.perf_counter() - began
        self._results.put(LoadResult(cid=image.cid, image=image, copy_s=seconds))


def load_workers(*, shares_cores: bool) -> Workers:
    """Return threads that take parts of a load; none if steps run on the same cores as loads."""
    num_threads = min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // 2)
    if shares_cores or num_threads < 2:
        return CALLING_THREAD
    executor = ThreadPoolExecutor(
        max_workers=num_threads, thread_name_prefix="pack", initializer=lower_priority
    )
    return Workers(executor, num_threads=num_threads)


def _as_loramux_error(error: Exception, cid: str) -> LoramuxError:
    if isinstance(error, LoramuxError):
        return error
    known = machine_error(error) if isinstance(error, OSError) else None
    if known is None:
        _log.error("adapter %s could not be loaded", cid, exc_info=error)
    return known or LoramuxError(f"Adapter {cid} could not be loaded; the log has the reason.")


def lower_priority() -> None:
    """Lets the calling thread, and threads it starts, run only on cores that would be idle.

    Niceness alone is not enough: a thread that wakes up still waits for the end of the other's
    time slice, and a step has hundreds of such waits. SCHED_IDLE is preempted at once.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
    if sys.platform == "linux":
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, _NICENESS)
        # Some sandboxes do not support other policies; niceness applies there.
        with suppress(OSError):
            os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
