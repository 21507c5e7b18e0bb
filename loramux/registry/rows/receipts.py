"""Queries of receipts by tenant, CID, time and latency."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, select

from loramux.errors import InvalidRequest
from loramux.registry.database import insert_into
from loramux.registry.records import ReceiptFilter, StoredReceipt
from loramux.registry.schema import receipts

MAX_LIMIT = 10_000
columns = receipts.c


def add_receipts(connection: Connection, new: Iterable[StoredReceipt]) -> None:
    """Inserts receipts; existing ones stay unchanged, so that a batch may be sent again."""
    values = [receipt_values(receipt) for receipt in new]
    if values:
        connection.execute(insert_into(connection, receipts).on_conflict_do_nothing(), values)


def receipt_values(receipt: StoredReceipt) -> dict[str, object]:
    return {
        "id": receipt.id,
        "created_at": receipt.created_at,
        "tenant": receipt.tenant,
        "cid": receipt.cid,
        "latency_ms": receipt.latency_ms,
        "is_cold": receipt.is_cold,
        "body": dict(receipt.body),
    }


def get_receipt(connection: Connection, receipt_id: str) -> StoredReceipt | None:
    row = connection.execute(select(receipts).where(columns.id == receipt_id)).one_or_none()
    return None if row is None else receipt_of(row)


def find_receipts(connection: Connection, wanted: ReceiptFilter) -> list[StoredReceipt]:
    if not 1 <= wanted.limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be 1 to {MAX_LIMIT}.", param="limit")
    newest = (columns.created_at.desc(), columns.id)
    order = (columns.latency_ms.desc(), *newest) if wanted.slowest_first else newest
    statement = restrict(select(receipts), wanted).order_by(*order).limit(wanted.limit)
    return [receipt_of(row) for row in connection.execute(statement)]


def restrict(statement: Select[Any], wanted: ReceiptFilter) -> Select[Any]:
    if wanted.tenant is not None:
        statement = statement.where(columns.tenant == wanted.tenant)
    if wanted.cids is not None:
        statement = statement.where(columns.cid.in_(wanted.cids))
    if wanted.since is not None:
        statement = statement.where(columns.created_at >= wanted.since)
    if wanted.min_latency_ms is not None:
        statement = statement.where(columns.latency_ms >= wanted.min_latency_ms)
    if wanted.is_cold is not None:
        statement = statement.where(columns.is_cold == wanted.is_cold)
    return statement


def receipt_cids(connection: Connection) -> set[str]:
    statement = select(receipts.c.cid).where(receipts.c.cid.is_not(None)).distinct()
    return set(connection.scalars(statement))


def prune_receipts(
    connection: Connection, *, older_than: float | None, max_count: int | None
) -> int:
    """Removes receipts and returns their number."""
    num_removed = 0
    if older_than is not None:
        old = delete(receipts).where(columns.created_at < older_than)
        num_removed += connection.execute(old).rowcount
    if max_count is not None:
        newest = select(columns.created_at).order_by(columns.created_at.desc())
        last_out = connection.scalar(newest.offset(max_count).limit(1))
        if last_out is not None:
            excess = delete(receipts).where(columns.created_at <= last_out)
            num_removed += connection.execute(excess).rowcount
    return num_removed


def receipt_of(row: Row[Any]) -> StoredReceipt:
    return StoredReceipt(
        id=row.id,
        created_at=row.created_at,
        tenant=row.tenant,
        cid=row.cid,
        latency_ms=row.latency_ms,
        is_cold=row.is_cold,
        body=row.body,
    )
