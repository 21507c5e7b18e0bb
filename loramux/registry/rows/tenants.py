"""Queries of the records of tenants and of their signing keys."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, delete, func, or_, select, update

from loramux.adapters.signature import SigningKey
from loramux.registry.database import insert_into
from loramux.registry.schema import adapters, api_keys, contents, signing_keys, tenants, versions
from loramux.types.limits import DEFAULT_SETTINGS, NO_LIMITS, Limits, TenantSettings


def find_tenant(connection: Connection, name: str) -> Row[Any] | None:
    return connection.execute(select(tenants).where(tenants.c.name == name)).one_or_none()


def list_tenants(connection: Connection) -> list[Row[Any]]:
    return list(connection.execute(select(tenants).order_by(tenants.c.name)))


def settings_of(connection: Connection, name: str) -> TenantSettings:
    found = find_tenant(connection, name)
    return DEFAULT_SETTINGS if found is None else read_settings(found)


def all_settings(connection: Connection) -> dict[str, TenantSettings]:
    """Return the settings of the tenants that have any."""
    has_settings = or_(tenants.c.settings.is_not(None), tenants.c.fair_share != 1)
    statement = select(tenants).where(has_settings)
    return {row.name: read_settings(row) for row in connection.execute(statement)}


def read_settings(row: Row[Any]) -> TenantSettings:
    return msgspec.convert({**(row.settings or {}), "share": row.fair_share}, TenantSettings)


def set_settings(connection: Connection, tenant_id: int, settings: TenantSettings) -> None:
    others = msgspec.to_builtins(msgspec.structs.replace(settings, share=1.0))
    statement = update(tenants).where(tenants.c.id == tenant_id)
    connection.execute(statement.values(settings=others or None, fair_share=settings.share))


def limits_of_key(connection: Connection, api_key_id: str) -> Limits:
    statement = select(api_keys.c.limits).where(api_keys.c.key_id == api_key_id)
    return read_limits(connection.scalar(statement))


def limits_of_keys(connection: Connection) -> dict[str, Limits]:
    """Return the limits of the keys that have any, the oldest key first."""
    columns = api_keys.c
    statement = select(columns.key_id, columns.limits).where(columns.limits.is_not(None))
    rows = connection.execute(statement.order_by(columns.created_at, columns.key_id))
    return {row.key_id: read_limits(row.limits) for row in rows}


def buckets_of_keys(connection: Connection) -> dict[str, str]:
    """Return the bucket of each key that is a rotation of another."""
    columns = api_keys.c
    statement = select(columns.key_id, columns.bucket).where(columns.bucket.is_not(None))
    return {row.key_id: row.bucket for row in connection.execute(statement)}


def set_limits_of_key(connection: Connection, api_key_id: str, limits: Limits) -> bool:
    """Return whether there is such a key."""
    value = msgspec.to_builtins(limits) or None
    statement = update(api_keys).where(api_keys.c.key_id == api_key_id)
    return bool(connection.execute(statement.values(limits=value)).rowcount)


def read_limits(value: object) -> Limits:
    return NO_LIMITS if value is None else msgspec.convert(value, Limits)


def count_adapters(connection: Connection, tenant: str, api_key_id: str | None = None) -> int:
    """Count the adapters that have a version; with a key those that it has pushed one to."""
    return int(connection.scalar(_live(tenant, api_key_id, func.count(adapters.c.id.distinct()))))


def stored_bytes(connection: Connection, tenant: str, api_key_id: str | None = None) -> int:
    """Add up the sizes of all versions; content that several versions share counts once."""
    cids = _live(tenant, api_key_id, versions.c.cid)
    total = func.coalesce(func.sum(contents.c.size_bytes), 0)
    return int(connection.scalar(select(total).where(contents.c.cid.in_(cids))) or 0)


def has_adapter(
    connection: Connection, tenant: str, name: str, api_key_id: str | None = None
) -> bool:
    found = _live(tenant, api_key_id, versions.c.id).where(adapters.c.name == name)
    return connection.execute(found.limit(1)).first() is not None


def has_content(
    connection: Connection, tenant: str, cid: str, api_key_id: str | None = None
) -> bool:
    found = _live(tenant, api_key_id, versions.c.id).where(versions.c.cid == cid)
    return connection.execute(found.limit(1)).first() is not None


def _live(tenant: str, api_key_id: str | None, column: Any) -> Select[Any]:
    """Select from the versions of a tenant that were not removed."""
    statement = (
        select(column)
        .select_from(versions)
        .join(adapters)
        .join(tenants)
        .where(tenants.c.name == tenant, versions.c.removed_at.is_(None))
    )
    return statement if api_key_id is None else statement.where(versions.c.pushed_by == api_key_id)


def add_signing_key(connection: Connection, tenant_id: int, key: SigningKey, *, now: float) -> None:
    values = {"tenant_id": tenant_id, "key_id": key.key_id, "public_key": key.public_key}
    statement = insert_into(connection, signing_keys).values(
        **values, name=key.name, created_at=now
    )
    connection.execute(statement.on_conflict_do_nothing())


def remove_signing_key(connection: Connection, tenant: str, key_id: str) -> bool:
    """Return whether the tenant had the key."""
    found = find_tenant(connection, tenant)
    if found is None:
        return False
    statement = delete(signing_keys).where(
        signing_keys.c.tenant_id == found.id, signing_keys.c.key_id == key_id
    )
    return bool(connection.execute(statement).rowcount)


def signing_keys_of(connection: Connection, tenant: str) -> list[SigningKey]:
    statement = (
        select(signing_keys)
        .join(tenants)
        .where(tenants.c.name == tenant)
        .order_by(signing_keys.c.created_at, signing_keys.c.key_id)
    )
    return [
        SigningKey(row.key_id, row.public_key, row.name, row.created_at)
        for row in connection.execute(statement)
    ]
