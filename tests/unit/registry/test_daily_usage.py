"""Usage by day, adapter and key, from the receipts that are stored."""

from __future__ import annotations

from typing import Any

from loramux.registry.records import RecentUse, StoredReceipt
from loramux.registry.registry import Registry
from tests.registry_factory import FakeClock

DAY = 86_400.0
SQL = {"cid": "c1", "tenant": "acme", "name": "sql", "version": "1.0.0"}
GIVEN = {"cid": "c2", "tenant": None, "name": "pirate"}


def receipt(number: int, at: float, *adapters: dict[str, Any], **body: Any) -> StoredReceipt:
    tenant = body.pop("tenant", "acme")
    return StoredReceipt(
        id=f"r{number}",
        created_at=at,
        tenant=tenant,
        cid=None,
        latency_ms=1.0,
        is_cold=False,
        body={
            "status": "completed",
            "pool_id": "pool",
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "reused_tokens": 4,
            "adapters": list(adapters),
            **body,
        },
    )


def rows(registry: Registry, **given: Any) -> list[tuple[object, ...]]:
    found = registry.daily_usage(since_day=0, until_day=10**6, **given)
    return [
        (
            *(one.day, one.tenant, one.adapter, one.api_key_id, one.num_requests),
            *(one.num_prompt_tokens, one.num_output_tokens, one.num_reused_tokens),
        )
        for one in found
    ]


def test_requests_are_added_up_by_day_adapter_and_key(registry: Registry) -> None:
    registry.add_receipts(
        [
            receipt(1, 0.0, SQL, api_key_id="k1"),
            receipt(2, DAY - 1, {**SQL, "version": "2.0.0"}, api_key_id="k1"),
            receipt(3, DAY, SQL, api_key_id="k1"),
            receipt(4, 5.0, SQL),
            receipt(5, 5.0, GIVEN, SQL),
            receipt(6, 5.0, tenant="globex"),
        ]
    )
    registry.add_receipts([receipt(7, 6.0, SQL, status="aborted", completion_tokens=1)])
    acme = [
        (0, "acme", "acme/sql", "", 2, 20, 6, 8),
        (0, "acme", "acme/sql", "k1", 2, 20, 10, 8),
        (0, "acme", "acme/sql+pirate", "", 1, 10, 5, 4),
        (1, "acme", "acme/sql", "k1", 1, 10, 5, 4),
    ]
    assert rows(registry, tenant="acme") == acme
    assert rows(registry) == [*acme[:3], (0, "globex", "", "", 1, 10, 5, 4), acme[3]]


def test_a_batch_that_is_sent_again_counts_once(registry: Registry) -> None:
    batch = [receipt(1, 0.0, SQL), receipt(2, 0.0, SQL)]
    registry.add_receipts(batch)
    registry.add_receipts([*batch, receipt(3, 0.0, SQL), receipt(3, 0.0, SQL)])
    assert [row[4] for row in rows(registry)] == [3]


def test_refused_requests_are_not_usage_and_pruning_keeps_it(registry: Registry) -> None:
    registry.add_receipts([receipt(1, 0.0, SQL), receipt(2, 0.0, SQL, status="refused")])
    registry.prune_receipts(max_count=0)
    assert [row[4] for row in rows(registry)] == [1]


def test_only_the_days_that_were_asked_for(registry: Registry) -> None:
    registry.add_receipts([receipt(day, day * DAY, SQL) for day in range(5)])
    found = registry.daily_usage(since_day=1, until_day=3)
    assert [one.day for one in found] == [1, 2, 3]


def test_the_use_of_the_last_minute_is_that_of_one_server(
    registry: Registry, clock: FakeClock
) -> None:
    now = clock.now
    registry.add_receipts(
        [
            receipt(1, now - 10, SQL, api_key_id="k1"),
            receipt(2, now - 20, SQL, api_key_id="k1"),
            receipt(3, now - 30, SQL),
            receipt(4, now - 70, SQL),
            receipt(5, now - 5, SQL, pool_id="another"),
            receipt(6, now - 5, SQL, status="refused"),
        ]
    )
    found = registry.recent_use(pool_id="pool", seconds=60)
    assert sorted(found, key=str) == [
        RecentUse("acme", "", 1, 15),
        RecentUse("acme", "k1", 2, 30),
    ]
