from __future__ import annotations

from pathlib import Path

import pytest

from loramux.errors import DoesNotFit
from loramux.memory.disk_tier import DiskTier
from loramux.memory.policies import LruPolicy
from loramux.memory.records import AdapterRecord
from loramux.memory.tiers import AdapterState
from tests.memory_factory import PACKING, cid_of, image_of, tiny_memory

A = cid_of(1)


def test_the_resting_place_is_the_fastest_tier_that_has_the_bytes(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, budget_bytes=2**20, packing=PACKING, policy=LruPolicy())
    tiers = tiny_memory(num_pages=2, disk=disk).tiers
    assert tiers.resting_place(A) is AdapterState.SOURCE
    from_source = tiers.reload_s(A, 2**20)
    disk.put(image_of(A))
    assert tiers.resting_place(A) is AdapterState.DISK
    from_disk = tiers.reload_s(A, 2**20)
    tiers.host.offer(image_of(A))
    assert tiers.resting_place(A) is AdapterState.HOST
    assert from_source > from_disk > tiers.reload_s(A, 2**20) > 0


def test_a_record_moves_only_along_the_table() -> None:
    memory = tiny_memory(num_pages=2)
    record = AdapterRecord(memory.adapters.get(A), 1)
    record.move(AdapterState.READING)
    assert record.is_in_flight
    with pytest.raises(AssertionError):
        record.move(AdapterState.COPYING)


def test_listeners_hear_of_pages_arrivals_and_departures() -> None:
    memory = tiny_memory(num_pages=2)
    told: list[object] = []
    listeners = memory.residency.listeners
    listeners.on_take.append(lambda page_ids: told.append(list(page_ids)))
    listeners.on_arrive.append(lambda adapter: told.append((adapter.cid, adapter.page_ids)))
    listeners.on_leave.append(told.append)
    memory.bring(A)
    assert told == [[0], (A, [0])]
    assert memory.residency.forget(A)
    assert told[2:] == [A]


def test_an_adapter_for_which_a_listener_has_no_room_has_not_arrived() -> None:
    memory = tiny_memory(num_pages=2)

    def refuse(_: object) -> None:
        raise DoesNotFit("the tables are full")

    memory.residency.listeners.on_arrive.append(refuse)
    memory.residency.want([A])
    memory.finish_loads()
    with pytest.raises(DoesNotFit, match="tables are full"):
        memory.residency.is_ready([A])
    assert A not in memory.residency and memory.pages.num_free == 2
    assert A in memory.host, "what was read stays in host memory"
    memory.residency.unwant([A])
    memory.check()
