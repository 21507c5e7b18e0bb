from __future__ import annotations

from typing import Any

import pytest

from loramux.errors import InvalidRequest
from loramux.registry.records import ReceiptFilter, StoredReceipt
from loramux.registry.registry import Registry
from tests.registry_factory import FakeClock, make_cid


def make_receipt(number: int, **changes: Any) -> StoredReceipt:
    values: dict[str, Any] = {
        "id": f"r-{number}",
        "created_at": float(number),
        "tenant": "alice",
        "cid": make_cid(1),
        "latency_ms": 10.0 * number,
        "is_cold": False,
        "body": {"id": f"r-{number}", "serving": {"latency_ms": 1.5, "cids": [], "alias": None}},
    }
    return StoredReceipt(**{**values, **changes})


def ids(registry: Registry, **wanted: Any) -> list[str]:
    return [receipt.id for receipt in registry.find_receipts(ReceiptFilter(**wanted))]


def test_a_receipt_comes_back_as_it_was_given(registry: Registry) -> None:
    base = make_receipt(2, cid=None, is_cold=True)
    registry.add_receipts([make_receipt(1), base])
    assert registry.receipt("r-2") == base
    assert registry.receipt("r-9") is None


def test_a_batch_that_is_sent_again_changes_nothing(registry: Registry) -> None:
    registry.add_receipts([make_receipt(1)])
    registry.add_receipts([make_receipt(1, tenant="mallory"), make_receipt(2)])
    registry.add_receipts([])
    assert ids(registry) == ["r-2", "r-1"]
    assert ids(registry, tenant="mallory") == []


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ["r-5", "r-4", "r-3", "r-2", "r-1"]),
        ({"limit": 2}, ["r-5", "r-4"]),
        ({"tenant": "bob"}, ["r-2"]),
        ({"cids": (make_cid(2), make_cid(9))}, ["r-3"]),
        ({"cids": ()}, []),
        ({"since": 4.0}, ["r-5", "r-4"]),
        ({"is_cold": True}, ["r-4"]),
        ({"is_cold": False, "since": 4.0}, ["r-5"]),
        ({"min_latency_ms": 40.0}, ["r-5", "r-4", "r-1"]),
        ({"slowest_first": True, "limit": 3}, ["r-1", "r-5", "r-4"]),
    ],
)
def test_receipts_are_found_by_tenant_cid_and_latency(
    registry: Registry, wanted: dict[str, Any], expected: list[str]
) -> None:
    registry.add_receipts(
        [
            make_receipt(1, latency_ms=900.0),
            make_receipt(2, tenant="bob"),
            make_receipt(3, cid=make_cid(2)),
            make_receipt(4, is_cold=True),
            make_receipt(5),
        ]
    )
    assert ids(registry, **wanted) == expected


@pytest.mark.parametrize("limit", [0, -1, 10_001])
def test_the_number_of_returned_receipts_is_limited(registry: Registry, limit: int) -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        ids(registry, limit=limit)


def test_old_receipts_are_pruned_by_age_and_count(registry: Registry, clock: FakeClock) -> None:
    start = clock.now
    registry.add_receipts([make_receipt(n, created_at=start + n) for n in range(10)])
    clock.advance(12.0)
    assert registry.prune_receipts(max_age_s=10.0) == 2
    assert registry.prune_receipts(max_count=5) == 3
    assert registry.prune_receipts(max_age_s=10.0, max_count=5) == 0
    assert ids(registry) == ["r-9", "r-8", "r-7", "r-6", "r-5"]


def test_the_cids_of_stored_receipts_are_listed(registry: Registry) -> None:
    registry.add_receipts([make_receipt(1), make_receipt(2), make_receipt(3, cid=None)])
    assert registry.receipt_cids() == {make_cid(1)}
    registry.prune_receipts(max_count=0)
    assert registry.receipt_cids() == set()


def test_a_receipt_of_a_sum_is_found_by_each_of_its_adapters(registry: Registry) -> None:
    parts = [{"cid": make_cid(number), "weight": 0.5} for number in (1, 2, 3)]
    registry.add_receipts([make_receipt(1, body={"adapters": parts}), make_receipt(2)])
    registry.add_receipts([make_receipt(1, body={"adapters": parts})])
    assert ids(registry, cids=(make_cid(1),)) == ["r-2", "r-1"]
    assert ids(registry, cids=(make_cid(2),)) == ids(registry, cids=(make_cid(3),)) == ["r-1"]
    assert ids(registry, cids=(make_cid(2), make_cid(3))) == ["r-1"], "found once"
    assert registry.receipt_cids() == {make_cid(1), make_cid(2), make_cid(3)}
    registry.prune_receipts(max_count=1)
    assert registry.receipt_cids() == {make_cid(1)}


def test_a_receipt_may_be_read_for_one_tenant_only(registry: Registry) -> None:
    receipt = make_receipt(1, tenant="acme")
    registry.add_receipts([receipt])
    assert registry.receipt(receipt.id, tenant="acme") == registry.receipt(receipt.id) == receipt
    assert registry.receipt(receipt.id, tenant="globex") is None
