from __future__ import annotations

from pathlib import Path

import pytest

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
