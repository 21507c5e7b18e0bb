from __future__ import annotations

from pathlib import Path

import pytest

from loramux.errors import DoesNotFit
from loramux.memory.records import AdapterRecord, ResidentAdapter
from loramux.memory.tiers import AdapterState
from tests.memory_factory import cid_of, disk_maker, image_of, tiny_memory

A = cid_of(1)


def test_the_resting_state_is_the_fastest_tier_that_has_the_bytes(tmp_path: Path) -> None:
    memory = tiny_memory(num_pages=2, make_disk=disk_maker(tmp_path))
    placement, costs, disk = memory.placement, memory.costs, memory.tiers.disk
    assert placement.resting_state(A) is AdapterState.SOURCE
    from_source = costs.reload_s(A, 2**20)
    assert disk is not None and disk.put(image_of(A))
    assert placement.resting_state(A) is AdapterState.DISK
    from_disk = costs.reload_s(A, 2**20)
    assert memory.host.reserve(A, image_of(A).num_bytes)
    memory.host.put(image_of(A))
    assert placement.resting_state(A) is AdapterState.HOST
    assert from_source > from_disk > costs.reload_s(A, 2**20) > 0


def test_a_record_moves_only_along_the_table() -> None:
    memory = tiny_memory(num_pages=2)
    record = AdapterRecord(memory.adapters.get(A), 1)
    record.move(AdapterState.READING)
    assert record.is_in_flight
    with pytest.raises(AssertionError):
        record.move(AdapterState.COPYING)


class Table:
    """An executor's table that records its calls, and is full if the test says so."""

    def __init__(self) -> None:
        self.is_full = False
        self.calls: list[object] = []

    def add(self, adapter: ResidentAdapter) -> None:
        if self.is_full:
            raise DoesNotFit("the table is full")
        self.calls.append((adapter.cid, adapter.page_ids))

    def forget(self, cid: str) -> None:
        self.calls.append(cid)


def test_the_table_of_the_executor_is_updated_when_an_adapter_arrives_and_when_it_leaves() -> None:
    table = Table()
    memory = tiny_memory(num_pages=2, table=table)
    memory.bring(A)
    assert table.calls == [(A, [0])]
    assert memory.residency.forget(A)
    assert table.calls[1:] == [A]


def test_pages_that_an_in_flight_step_reads_are_fenced_before_a_load() -> None:
    memory = tiny_memory(num_pages=1)
    fenced: list[list[int]] = []
    memory.rank.fence = fenced.append  # type: ignore[method-assign]
    memory.bring(A)
    assert fenced == []
    memory.pages.step_launched()
    memory.bring(cid_of(2))
    assert fenced == [[0]]


def test_a_load_fails_if_the_table_of_the_executor_is_full() -> None:
    table = Table()
    table.is_full = True
    memory = tiny_memory(num_pages=2, table=table)
    memory.residency.add_waiters([A])
    memory.finish_loads()
    with pytest.raises(DoesNotFit, match="table is full"):
        memory.residency.is_ready([A])
    assert A not in memory.residency and memory.pages.num_free == 2
    assert A in memory.host, "the image stays in host memory"
    memory.residency.remove_waiters([A])
    memory.check()
