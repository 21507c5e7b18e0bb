from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from loramux.adapters.packed.image import AdapterImage
from loramux.errors import AdapterRefused
from loramux.memory.loader import AdapterLoader, LoadResult, LoadThrottle
from loramux.memory.tiers import AdapterState
from tests.memory_factory import NumberedAdapters, cid_of, tiny_disk

A = cid_of(1)


class Written:
    def __init__(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.niceness: int | None = None
        self.policy: int | None = None

    def __call__(self, page_ids: list[int], image: AdapterImage) -> None:
        if sys.platform == "linux":
            self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            self.policy = os.sched_getscheduler(threading.get_native_id())
        if page_ids == [13]:
            raise RuntimeError("no such page")
        self.pages[image.cid] = page_ids


def take(loader: AdapterLoader) -> LoadResult:
    (result,) = loader.results(timeout_s=10)
    return result


def test_a_read_from_source_is_written_to_disk(
    tmp_path: Path,
) -> None:
    disk = tiny_disk(tmp_path)
    adapters, written = NumberedAdapters(), Written()
    loader = AdapterLoader(source=adapters, disk=disk, write_pages=written)
    loader.read(A, [3])
    assert loader.num_active == 1
    first = take(loader)
    assert first.image is not None and first.found is AdapterState.SOURCE
    assert written.pages == {A: [3]} and loader.num_active == 0
    # The file is written after the result is handed over; close() waits for it.
    loader.close()
    loader = AdapterLoader(source=adapters, disk=disk, write_pages=written)
    loader.read(A, [])
    second = take(loader)
    assert second.found is AdapterState.DISK and adapters.num_reads == 1
    assert second.image is not None and torch.equal(second.image.buffer, first.image.buffer)
    loader.close()


def test_pages_are_filled_while_the_image_is_read(tmp_path: Path) -> None:
    disk = tiny_disk(tmp_path)
    adapters, written = NumberedAdapters(), Written()
    pages = bytearray()

    def write_slice(page_ids: list[int], start: int, data: memoryview) -> None:
        assert page_ids == [3] and start == len(pages)
        pages.extend(data)

    disk.put(adapters.read(A))
    loader = AdapterLoader(source=adapters, disk=disk, write_pages=written, write_slice=write_slice)
    loader.read(A, [3])
    image = take(loader).image
    assert image is not None and pages == image.buffer.view(torch.uint8).numpy().tobytes()
    assert written.pages == {}, "the same bytes were copied twice"
    # Without pages, it is read into host memory only.
    loader.read(A, [])
    assert take(loader).error is None and len(pages) == image.num_bytes
    loader.close()


def test_an_image_that_is_broken_on_disk_leaves_nothing_in_the_pages(tmp_path: Path) -> None:
    disk = tiny_disk(tmp_path)
    adapters, written = NumberedAdapters(), Written()
    disk.put(adapters.read(A))
    (path,) = tmp_path.rglob("*.image")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    loader = AdapterLoader(
        source=adapters, disk=disk, write_pages=written, write_slice=lambda *_: None
    )
    loader.read(A, [3])
    result = take(loader)
    assert result.found is AdapterState.SOURCE
    assert written.pages == {A: [3]}, "what was read from the broken file is served"
    loader.close()


def test_errors_are_results_too(caplog: pytest.LogCaptureFixture) -> None:
    adapters = NumberedAdapters(broken={A})
    loader = AdapterLoader(source=adapters, disk=None, write_pages=Written())
    loader.read(A, [])
    assert isinstance(take(loader).error, AdapterRefused)
    loader.read(cid_of(2), [13])
    assert "log has the reason" in str(take(loader).error)
    assert "no such page" in caplog.text
    assert loader.num_active == 0 and loader.results() == []
    loader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
def test_loader_threads_run_at_idle_priority() -> None:
    written = Written()
    loader = AdapterLoader(source=NumberedAdapters(), disk=None, write_pages=written)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    loader.read(A, [1])
    take(loader)
    loader.close()
    assert written.niceness is not None and written.niceness > mine
    assert written.policy == os.SCHED_IDLE and os.sched_getscheduler(0) != os.SCHED_IDLE
    assert sys.getswitchinterval() <= 0.001, "a loader thread holds the GIL for milliseconds"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
def test_niceness_remains_where_the_idle_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    written = Written()
    loader = AdapterLoader(source=NumberedAdapters(), disk=None, write_pages=written)
    loader.read(A, [1])
    assert take(loader).error is None
    loader.close()
    assert written.niceness == 19 and written.policy != os.SCHED_IDLE


class Worked:
    """A thread's CPU time, set by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_throttle(sleep_factor: float) -> tuple[LoadThrottle, Worked, list[float]]:
    worked = Worked()
    sleeps: list[float] = []
    return LoadThrottle(sleep_factor, worked_s=worked, sleep=sleeps.append), worked, sleeps


def test_a_thread_sleeps_in_proportion_to_its_work_since_the_last_sleep() -> None:
    throttle, worked, sleeps = make_throttle(2.0)
    worked.seconds = 7.0
    throttle.begin()
    for seconds in (7.5, 8.5):
        worked.seconds = seconds
        throttle.pause()
    assert sleeps == [1.0, 2.0], "work before the load was counted, or some of it twice"


def test_no_thread_sleeps_while_the_step_loop_waits_for_loads() -> None:
    throttle, worked, sleeps = make_throttle(2.0)
    throttle.begin()
    with throttle.off():
        worked.seconds = 1.0
        throttle.pause()
    assert sleeps == []
    throttle.pause()
    assert len(sleeps) == 1, "the throttle stays off"
