"""Queries of the usage statistics of CIDs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, func, select

from loramux.registry.database import insert_into
from loramux.registry.records import Usage, Use
from loramux.registry.schema import statistics

COUNTERS = ("num_requests", "num_prompt_tokens", "num_output_tokens")
columns = statistics.c


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
