"""Queries of the audit log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Row, Select, insert, select, update

from loramux.errors import RegistryUnavailable
from loramux.registry.schema import audit_entries, audit_head

columns = audit_entries.c


def lock_head(connection: Connection) -> tuple[int, str]:
    """Return number and digest of the last entry; other appends wait until the transaction ends.

    The digest is empty before the first entry.
    """
    statement = update(audit_head).values(number=audit_head.c.number + 1)
    found = connection.execute(statement.returning(audit_head.c.number, audit_head.c.digest))
    row = found.one_or_none()
    if row is None:
        raise RegistryUnavailable(
            "The recorded end of the audit log is missing, so that no change can be recorded. "
            "Run `loramux audit verify`, and restore the registry from a backup."
        )
    return row.number - 1, row.digest


def read_head(connection: Connection) -> tuple[int, str] | None:
    row = connection.execute(select(audit_head)).one_or_none()
    return None if row is None else (row.number, row.digest)


def add_entry(connection: Connection, values: Mapping[str, object]) -> None:
    connection.execute(insert(audit_entries).values(**values))
    connection.execute(update(audit_head).values(digest=values["digest"]))


def read_all(connection: Connection, *, batch: int) -> Iterator[Row[Any]]:
    """Yield all entries in their order; only a batch of them is in memory."""
    last = -(2**63)
    while True:
        statement = select(audit_entries).where(columns.number > last).order_by(columns.number)
        rows = connection.execute(statement.limit(batch)).all()
        yield from rows
        if len(rows) < batch:
            return
        last = rows[-1].number


def find_entries(
    connection: Connection,
    *,
    tenant: str | None,
    action: str | None,
    before: int | None,
    limit: int,
) -> list[Row[Any]]:
    """Return entries, the newest first."""
    statement: Select[Any] = select(audit_entries)
    if tenant is not None:
        statement = statement.where(columns.tenant == tenant)
    if action is not None:
        statement = statement.where(columns.action == action)
    if before is not None:
        statement = statement.where(columns.number < before)
    return list(connection.execute(statement.order_by(columns.number.desc()).limit(limit)))
