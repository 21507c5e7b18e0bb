from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from loramux.adapters.packed.image import AdapterImage
from loramux.errors import AdapterRefused
from loramux.memory.disk_tier import DiskTier
from loramux.memory.loader import AdapterLoader, Arrival
from loramux.memory.policies import LruPolicy
from loramux.memory.tiers import AdapterState
from tests.memory_factory import PACKING, NumberedAdapters, cid_of

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


def take(loader: AdapterLoader) -> Arrival:
    (arrival,) = loader.arrivals(timeout_s=10)
    return arrival


def test_a_read_goes_to_disk_as_well_and_comes_from_there_next_time(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, budget_bytes=2**20, packing=PACKING, policy=LruPolicy())
    adapters, written = NumberedAdapters(), Written()
    loader = AdapterLoader(source=adapters, disk=disk, write_pages=written)
    loader.read(A, [3])
    assert loader.num_open == 1
    first = take(loader)
    assert first.image is not None and first.found is AdapterState.SOURCE
    assert written.pages == {A: [3]} and loader.num_open == 0
    # One job after the other on the same thread would do as well: the copy on disk comes later.
    loader.close()
    loader = AdapterLoader(source=adapters, disk=disk, write_pages=written)
    loader.read(A, [])
    second = take(loader)
    assert second.found is AdapterState.DISK and adapters.num_reads == 1
    assert second.image is not None and torch.equal(second.image.buffer, first.image.buffer)
    loader.close()


def test_pages_are_filled_while_the_image_is_read(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, budget_bytes=2**20, packing=PACKING, policy=LruPolicy())
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
    # To host memory only.
    loader.read(A, [])
    assert take(loader).error is None and len(pages) == image.num_bytes
    loader.close()


def test_an_image_that_is_broken_on_disk_leaves_nothing_in_the_pages(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, budget_bytes=2**20, packing=PACKING, policy=LruPolicy())
    adapters, written = NumberedAdapters(), Written()
    disk.put(adapters.read(A))
    (path,) = tmp_path.rglob("*.image")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    loader = AdapterLoader(
        source=adapters, disk=disk, write_pages=written, write_slice=lambda *_: None
    )
    loader.read(A, [3])
    arrival = take(loader)
    assert arrival.found is AdapterState.SOURCE
    assert written.pages == {A: [3]}, "what was read from the broken file is served"
    loader.close()


def test_errors_arrive_like_everything_else() -> None:
    adapters = NumberedAdapters(broken={A})
    loader = AdapterLoader(source=adapters, disk=None, write_pages=Written())
    loader.read(A, [])
    assert isinstance(take(loader).error, AdapterRefused)
    loader.read(cid_of(2), [13])
    assert "no such page" in str(take(loader).error)
    assert loader.num_open == 0 and loader.arrivals() == []
    loader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
def test_loads_give_way_to_the_step_loop() -> None:
    written = Written()
    loader = AdapterLoader(source=NumberedAdapters(), disk=None, write_pages=written)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    loader.read(A, [1])
    take(loader)
    loader.close()
    assert written.niceness is not None and written.niceness > mine
    assert written.policy == os.SCHED_IDLE and os.sched_getscheduler(0) != os.SCHED_IDLE
    assert sys.getswitchinterval() <= 0.001, "a loader keeps the interpreter for milliseconds"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
def test_where_the_idle_policy_is_refused_niceness_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    written = Written()
    loader = AdapterLoader(source=NumberedAdapters(), disk=None, write_pages=written)
    loader.read(A, [1])
    assert take(loader).error is None
    loader.close()
    assert written.niceness == 19 and written.policy != os.SCHED_IDLE
