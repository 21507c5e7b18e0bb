"""Queries of the usage statistics of CIDs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, func, select

from loramux.registry.database import insert_into
from loramux.registry.records import DailyUsage, StoredReceipt, Usage, Use
from loramux.registry.schema import daily_usage, statistics

REFUSED = "refused"
SECONDS_PER_DAY = 86_400
MAX_ADAPTER_CHARACTERS = 512
COUNTERS = ("num_requests", "num_prompt_tokens", "num_output_tokens")
columns = statistics.c
daily = daily_usage.c
_DAILY_KEY = ("day", "tenant", "api_key_id", "adapter")
_TOKEN_FIELDS = ("prompt_tokens", "completion_tokens", "reused_tokens")
DAILY_COUNTERS = (*COUNTERS, "num_reused_tokens")


def add_uses(connection: Connection, uses: Iterable[Use]) -> None:
    values = [sum_uses(cid, group) for cid, group in sorted(group_by_cid(uses).items())]
    if not values:
        return
    statement = insert_into(connection, statistics)
    new = statement.excluded
    later = func.max if connection.dialect.name == "sqlite" else func.greatest
    # All writers use one order of rows, which prevents deadlocks.
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=[columns.cid],
            set_={
                **{name: columns[name] + new[name] for name in COUNTERS},
                "last_used_at": later(columns.last_used_at, new.last_used_at),
            },
        ),
        values,
    )


def group_by_cid(uses: Iterable[Use]) -> dict[str, list[Use]]:
    groups: dict[str, list[Use]] = {}
    for use in uses:
        groups.setdefault(use.cid, []).append(use)
    return groups


def sum_uses(cid: str, uses: list[Use]) -> dict[str, object]:
    counts = {name: sum(getattr(use, name) for use in uses) for name in COUNTERS}
    return {"cid": cid, **counts, "last_used_at": max(use.at for use in uses)}


def get_usage(connection: Connection, cid: str) -> Usage | None:
    row = connection.execute(select(statistics).where(columns.cid == cid)).one_or_none()
    return None if row is None else usage(row)


def most_used(connection: Connection, *, limit: int, since: float) -> list[Usage]:
    statement = select(statistics).where(columns.last_used_at >= since)
    ordered = statement.order_by(columns.num_requests.desc(), columns.last_used_at.desc())
    return [usage(row) for row in connection.execute(ordered.limit(limit))]


def used_since(connection: Connection, since: float) -> set[str]:
    return set(connection.scalars(select(columns.cid).where(columns.last_used_at >= since)))


def usage(row: Row[Any]) -> Usage:
    return Usage(
        cid=row.cid,
        num_requests=row.num_requests,
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens,
        last_used_at=row.last_used_at,
    )


def add_daily(connection: Connection, receipts: Iterable[StoredReceipt]) -> None:
    """Add served requests to the usage of their day; refused ones are not counted."""
    counts: dict[tuple[int, str, str, str], list[int]] = {}
    for receipt in receipts:
        body = receipt.body
        if body.get("status") != REFUSED:
            total = counts.setdefault(_daily_key(receipt), [0, 0, 0, 0])
            for at, number in enumerate((1, *(_count(body, name) for name in _TOKEN_FIELDS))):
                total[at] += number
    if not counts:
        return
    statement = insert_into(connection, daily_usage)
    set_ = {name: daily[name] + statement.excluded[name] for name in DAILY_COUNTERS}
    # All writers use one order of rows, which prevents deadlocks.
    connection.execute(
        statement.on_conflict_do_update(index_elements=list(_DAILY_KEY), set_=set_),
        [
            dict(zip((*_DAILY_KEY, *DAILY_COUNTERS), (*key, *counts[key]), strict=True))
            for key in sorted(counts)
        ],
    )


def _daily_key(receipt: StoredReceipt) -> tuple[int, str, str, str]:
    day = int(receipt.created_at // SECONDS_PER_DAY)
    key = receipt.body.get("api_key_id")
    return (day, receipt.tenant, key if isinstance(key, str) else "", _adapter_of(receipt.body))


def _adapter_of(body: Mapping[str, Any]) -> str:
    """Return the names of the adapters without version and weight; empty for the base."""
    names = [
        f"{one['tenant']}/{one['name']}" if one.get("tenant") else one.get("name") or one["cid"]
        for one in body.get("adapters") or ()
    ]
    return "+".join(sorted(set(names)))[:MAX_ADAPTER_CHARACTERS]


def _count(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name, 0)
    return value if isinstance(value, int) else 0


def find_daily(
    connection: Connection, *, tenant: str | None, since_day: int, until_day: int
) -> list[DailyUsage]:
    """Return the usage of the days from `since_day` to `until_day`, both included."""
    statement = select(daily_usage).where(daily.day >= since_day, daily.day <= until_day)
    if tenant is not None:
        statement = statement.where(daily.tenant == tenant)
    ordered = statement.order_by(daily.day, daily.tenant, daily.adapter, daily.api_key_id)
    return [DailyUsage(**row._mapping) for row in connection.execute(ordered)]
