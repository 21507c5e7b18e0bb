"""Queries of receipts by tenant, CID, time and latency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, or_, select, union

from loramux.errors import InvalidRequest
from loramux.registry.database import insert_into
from loramux.registry.records import ReceiptFilter, RecentUse, StoredReceipt
from loramux.registry.rows.usage import REFUSED, add_daily
from loramux.registry.schema import receipt_parts, receipts

MAX_LIMIT = 10_000
columns = receipts.c


def add_receipts(connection: Connection, new: Iterable[StoredReceipt]) -> None:
    """Insert receipts and add them to the usage of their days.

    Existing ones stay unchanged and count once, so that a batch may be sent again.
    """
    new = list({receipt.id: receipt for receipt in new}.values())
    values = [receipt_values(receipt) for receipt in new]
    if values:
        statement = insert_into(connection, receipts).on_conflict_do_nothing()
        inserted = set(connection.scalars(statement.returning(columns.id), values))
        add_daily(connection, [receipt for receipt in new if receipt.id in inserted])
    parts = [part for receipt in new for part in part_values(receipt)]
    if parts:
        connection.execute(insert_into(connection, receipt_parts).on_conflict_do_nothing(), parts)


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


def part_values(receipt: StoredReceipt) -> list[dict[str, object]]:
    """Return the rows of the receipt's adapters other than its first, and of their recipes."""
    adapters = receipt.body.get("adapters")
    cids = set(_cids(adapters)) if isinstance(adapters, list) else set()
    return [{"receipt_id": receipt.id, "cid": cid} for cid in sorted(cids - {receipt.cid})]


def _cids(adapters: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for adapter in adapters:
        yield adapter["cid"]
        if "recipe_cid" in adapter:
            yield adapter["recipe_cid"]
        for part in adapter.get("recipe", {}).get("parts", ()):
            yield part["cid"]


def get_receipt(
    connection: Connection, receipt_id: str, tenant: str | None = None
) -> StoredReceipt | None:
    statement = select(receipts).where(columns.id == receipt_id)
    if tenant is not None:
        statement = statement.where(columns.tenant == tenant)
    row = connection.execute(statement).one_or_none()
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
        parts = select(receipt_parts.c.receipt_id).where(receipt_parts.c.cid.in_(wanted.cids))
        statement = statement.where(or_(columns.cid.in_(wanted.cids), columns.id.in_(parts)))
    if wanted.since is not None:
        statement = statement.where(columns.created_at >= wanted.since)
    if wanted.min_latency_ms is not None:
        statement = statement.where(columns.latency_ms >= wanted.min_latency_ms)
    if wanted.is_cold is not None:
        statement = statement.where(columns.is_cold == wanted.is_cold)
    if wanted.statuses is not None:
        statement = statement.where(columns.body["status"].as_string().in_(wanted.statuses))
    return statement


def recent_use(connection: Connection, *, pool_id: str, since: float) -> list[RecentUse]:
    """Add up what each tenant and key has used on one server."""
    body = columns.body
    key = func.coalesce(body["api_key_id"].as_string(), "")
    tokens = body["prompt_tokens"].as_integer() + body["completion_tokens"].as_integer()
    statement = (
        select(columns.tenant, key, func.count(), func.sum(tokens))
        .where(columns.created_at >= since)
        .where(body["pool_id"].as_string() == pool_id, body["status"].as_string() != REFUSED)
        .group_by(columns.tenant, key)
    )
    return [RecentUse(*row) for row in connection.execute(statement)]


def receipt_cids(connection: Connection) -> set[str]:
    first = select(columns.cid).where(columns.cid.is_not(None))
    return set(connection.scalars(union(first, select(receipt_parts.c.cid))))


def prune_receipts(
    connection: Connection, *, older_than: float | None, max_count: int | None
) -> int:
    """Remove receipts and return their number."""
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
    if num_removed:
        kept = select(columns.id)
        connection.execute(delete(receipt_parts).where(receipt_parts.c.receipt_id.not_in(kept)))
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
