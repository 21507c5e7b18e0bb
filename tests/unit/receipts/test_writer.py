"""Receipts are stored in the background, also with a slow or unreachable registry."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from loramux.errors import RegistryUnavailable
from loramux.receipts import writer as receipt_writer
from loramux.receipts.writer import BATCH_RECEIPTS, ReceiptWriter, to_record
from loramux.registry.records import ReceiptFilter, StoredReceipt
from loramux.registry.registry import Registry
from tests.receipt_factory import make_receipt
from tests.registry_factory import FakeClock, make_cid, write_empty_registry

WAIT_S = 30.0


class HeldRegistry(Registry):
    """A real registry whose writes can be delayed, refused or observed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.faults: list[Exception] = []
        self.batch_sizes: list[int] = []

    def add_receipts(self, receipts: Iterable[StoredReceipt]) -> None:
        batch = list(receipts)
        self.entered.set()
        assert self.go.wait(WAIT_S)
        if self.faults:
            raise self.faults.pop(0)
        self.batch_sizes.append(len(batch))
        super().add_receipts(batch)

    def ids(self) -> set[str]:
        return {receipt.id for receipt in self.find_receipts(ReceiptFilter(limit=10_000))}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldRegistry]:
    with HeldRegistry(write_empty_registry(tmp_path / "held.db")) as registry:
        yield registry


def test_a_flushed_receipt_is_in_the_registry_as_the_client_got_it(registry: Registry) -> None:
    with ReceiptWriter(registry) as writer:
        writer.add(make_receipt(1))
        assert writer.flush(timeout_s=WAIT_S)
        assert registry.receipt("cmpl-1") == to_record(make_receipt(1))
        assert (writer.num_stored, writer.num_dropped) == (1, 0)


def test_close_stores_what_is_pending_in_batches(held: HeldRegistry) -> None:
    held.go.clear()
    writer = ReceiptWriter(held)
    for number in range(2 * BATCH_RECEIPTS + 1):
        writer.add(make_receipt(number))
    held.go.set()
    writer.close()
    assert len(held.ids()) == 2 * BATCH_RECEIPTS + 1
    assert max(held.batch_sizes) <= BATCH_RECEIPTS
    assert writer.num_dropped == 0


def test_receipts_of_many_threads_all_arrive(held: HeldRegistry) -> None:
    with ReceiptWriter(held) as writer:

        def add(first: int) -> None:
            for number in range(first, first + 50):
                writer.add(make_receipt(number))

        threads = [threading.Thread(target=add, args=(50 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.flush(timeout_s=WAIT_S)
    assert len(held.ids()) == 200


def test_a_hanging_registry_blocks_no_request_and_drops_the_oldest(held: HeldRegistry) -> None:
    held.go.clear()
    with ReceiptWriter(held, max_pending=3) as writer:
        writer.add(make_receipt(0))
        assert held.entered.wait(WAIT_S)
        for number in range(1, 6):
            writer.add(make_receipt(number))
        assert writer.num_dropped == 2
        assert not writer.flush(timeout_s=0)
        held.go.set()
        assert writer.flush(timeout_s=WAIT_S)
    assert held.ids() == {"cmpl-0", "cmpl-3", "cmpl-4", "cmpl-5"}


def test_a_queued_receipt_can_be_found(held: HeldRegistry) -> None:
    held.go.clear()
    with ReceiptWriter(held) as writer:
        writer.add(make_receipt(0))
        assert held.entered.wait(WAIT_S)
        writer.add(make_receipt(1))
        assert writer.find("cmpl-0") == make_receipt(0)
        assert writer.find("cmpl-1") == make_receipt(1)
        assert writer.find("cmpl-2") is None
        held.go.set()
        assert writer.flush(timeout_s=WAIT_S)
        assert writer.find("cmpl-0") is None


def test_receipts_wait_for_an_unreachable_registry(
    held: HeldRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt_writer, "RETRY_S", 0.0)
    held.faults = [RegistryUnavailable("away"), RegistryUnavailable("away")]
    with ReceiptWriter(held) as writer:
        writer.add(make_receipt(0))
        assert writer.flush(timeout_s=WAIT_S)
        assert (writer.num_stored, writer.num_dropped) == (1, 0)
    assert held.ids() == {"cmpl-0"}


def test_an_unreachable_registry_does_not_block_close(
    held: HeldRegistry,
) -> None:
    held.faults = [RegistryUnavailable("away")] * 9
    writer = ReceiptWriter(held)
    writer.add(make_receipt(0))
    writer.add(make_receipt(1))
    writer.close()
    assert writer.num_dropped == 2
    writer.add(make_receipt(2))
    assert writer.num_dropped == 3
    assert held.faults, "it went on trying although it was closed"


def test_one_rejected_receipt_does_not_lose_the_others(
    held: HeldRegistry,
) -> None:
    held.go.clear()
    with ReceiptWriter(held) as writer:
        writer.add(make_receipt(0, tenant=object()))
        writer.add(make_receipt(1))
        held.go.set()
        assert writer.flush(timeout_s=WAIT_S)
        assert (writer.num_stored, writer.num_dropped) == (1, 1)
    assert held.ids() == {"cmpl-1"}


def test_uses_are_counted_for_every_adapter(held: HeldRegistry) -> None:
    with ReceiptWriter(held) as writer:
        writer.add(make_receipt(0))
        writer.add(make_receipt(1, adapter_cid=None, adapters=()))
        writer.add(make_receipt(2, adapters=make_receipt(0).adapters, time=1_800_000_000.0))
    usage = held.usage(make_cid(0))
    assert usage is not None
    assert (usage.num_requests, usage.num_prompt_tokens, usage.num_output_tokens) == (2, 34, 10)
    assert usage.last_used_at == 1_800_000_000.0


def test_old_receipts_are_pruned_once_a_minute(registry: Registry, clock: FakeClock) -> None:
    seconds = FakeClock(0.0)
    old, new = make_receipt(0, time=clock.now - 100), make_receipt(1, time=clock.now)
    registry.add_receipts([to_record(old)])
    with ReceiptWriter(registry, max_age_s=50, clock=seconds) as writer:
        writer.add(new)
        assert writer.flush(timeout_s=WAIT_S)
        assert registry.receipt(old.id) is None
        assert registry.receipt(new.id) is not None
        clock.advance(60)
        writer.add(make_receipt(2, time=clock.now))
        assert writer.flush(timeout_s=WAIT_S)
        assert registry.receipt(new.id) is not None, "it was pruned before its time"
        seconds.advance(60)
        for number in (3, 4):
            writer.add(make_receipt(number, time=clock.now))
            assert writer.flush(timeout_s=WAIT_S)
        assert registry.receipt(new.id) is None


def test_without_retention_receipts_stay(held: HeldRegistry) -> None:
    held.add_receipts([to_record(make_receipt(0, time=0.0))])
    ReceiptWriter(held).close()
    assert held.ids() == {"cmpl-0"}
