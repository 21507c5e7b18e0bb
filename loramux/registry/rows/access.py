"""Queries of keys, shares between tenants, and tenants."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, func, or_, select, text, update

from loramux.errors import AdapterNotFound
from loramux.registry.database import insert_into
from loramux.registry.keys import KeyRecord, KeyRights
from loramux.registry.names import AdapterName
from loramux.registry.records import Share
from loramux.registry.schema import adapters, api_keys, registry_state, shares, tenants
from loramux.types.access import KeyScope

CHANNEL = "loramux_registry"


def note_change(connection: Connection, revision: int) -> None:
    """Tells the watchers that keys, shares or tenants have changed."""
    connection.execute(update(registry_state).values(access_revision=revision))
    notify(connection)


def notify(connection: Connection) -> None:
    """Wakes the watchers at the commit; they then query what changed."""
    if connection.dialect.name == "postgresql":
        statement = text("SELECT pg_notify(:channel, '')")
        connection.execute(statement, {"channel": CHANNEL})


def access_revision(connection: Connection) -> int:
    found = connection.scalar(select(registry_state.c.access_revision))
    assert found is not None
    return int(found)


def make_tenant(connection: Connection, name: str, *, now: float) -> int:
    """Return the id of a tenant, and create it if needed."""
    values = {"name": name, "created_at": now}
    statement = insert_into(connection, tenants).values(**values)
    connection.execute(statement.on_conflict_do_nothing())
    found = connection.scalar(select(tenants.c.id).where(tenants.c.name == name))
    assert found is not None
    return int(found)


def set_fair_share(connection: Connection, tenant_id: int, fair_share: float) -> None:
    statement = update(tenants).where(tenants.c.id == tenant_id)
    connection.execute(statement.values(fair_share=fair_share))


def fair_shares(connection: Connection) -> dict[str, float]:
    """Return the fair shares of tenants other than 1."""
    statement = select(tenants.c.name, tenants.c.fair_share).where(tenants.c.fair_share != 1)
    return {row.name: row.fair_share for row in connection.execute(statement)}


def add_key(
    connection: Connection, key: KeyRecord, tenant_id: int | None, bucket: str | None
) -> None:
    rights = key.rights
    connection.execute(
        insert_into(connection, api_keys).values(
            key_id=key.key_id,
            tenant_id=tenant_id,
            note=key.note,
            salt=key.salt,
            digest=key.digest,
            scopes=sorted(rights.scopes),
            adapters=None if rights.adapters is None else list(rights.adapters),
            may_use_base=rights.may_use_base,
            created_at=key.created_at,
            expires_at=key.expires_at,
            bucket=bucket,
        )
    )


def bucket_of(connection: Connection, key_id: str) -> str:
    """Return the id of the first key of which this one is a rotation, or its own id."""
    bucket = connection.scalar(select(api_keys.c.bucket).where(api_keys.c.key_id == key_id))
    return bucket or key_id


def count_valid_keys(connection: Connection, tenant_id: int, now: float) -> int:
    columns = api_keys.c
    statement = select(func.count()).where(
        columns.tenant_id == tenant_id,
        or_(columns.expires_at.is_(None), columns.expires_at > now),
        or_(columns.revoked_at.is_(None), columns.revoked_at > now),
    )
    return int(connection.scalar(statement) or 0)


def forget_ended_keys(connection: Connection, tenant_id: int, now: float, *, kept: int) -> None:
    """Delete all but the newest keys of a tenant that have ended; the audit log names them."""
    columns = api_keys.c
    has_ended = or_(columns.expires_at <= now, columns.revoked_at <= now)
    ended = (
        select(columns.key_id)
        .where(columns.tenant_id == tenant_id, has_ended)
        .order_by(columns.created_at.desc(), columns.key_id)
        .offset(kept)
    )
    found = list(connection.scalars(ended))
    if found:
        connection.execute(delete(api_keys).where(columns.key_id.in_(found)))


def list_keys(connection: Connection) -> list[KeyRecord]:
    """Return all keys, also revoked ones, the oldest first."""
    statement = select(api_keys, tenants.c.name).select_from(api_keys).outerjoin(tenants)
    rows = connection.execute(statement.order_by(api_keys.c.created_at, api_keys.c.key_id))
    return [key_of(row) for row in rows]


def set_revoked(connection: Connection, key_id: str, at: float) -> None:
    statement = update(api_keys).where(api_keys.c.key_id == key_id)
    connection.execute(statement.values(revoked_at=at))


def key_of(row: Row[Any]) -> KeyRecord:
    return KeyRecord(
        key_id=row.key_id,
        rights=KeyRights(
            tenant=row.name,
            scopes=frozenset(KeyScope(scope) for scope in row.scopes),
            adapters=None if row.adapters is None else tuple(row.adapters),
            may_use_base=row.may_use_base,
        ),
        note=row.note,
        salt=row.salt,
        digest=row.digest,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )


def add_share(connection: Connection, adapter_id: int, share: Share, *, now: float) -> None:
    values = {"adapter_id": adapter_id, "tenant": share.tenant, "version": share.version}
    statement = insert_into(connection, shares).values(**values, created_at=now)
    connection.execute(statement.on_conflict_do_nothing())


def remove_share(connection: Connection, adapter_id: int, share: Share) -> None:
    """Remove a share; without a version all shares of the adapter with the tenant."""
    statement = delete(shares).where(
        shares.c.adapter_id == adapter_id, shares.c.tenant == share.tenant
    )
    if share.version:
        statement = statement.where(shares.c.version == share.version)
    if not connection.execute(statement).rowcount:
        raise AdapterNotFound(f"{share} does not exist.")


def remove_shares_of(connection: Connection, adapter_id: int) -> int:
    return connection.execute(delete(shares).where(shares.c.adapter_id == adapter_id)).rowcount


def list_shares(connection: Connection) -> list[Share]:
    rows = connection.execute(
        select(tenants.c.name.label("owner"), adapters.c.name, shares.c.tenant, shares.c.version)
        .select_from(shares)
        .join(adapters, adapters.c.id == shares.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .order_by(tenants.c.name, adapters.c.name, shares.c.tenant, shares.c.version)
    )
    return [Share(AdapterName(row.owner, row.name), row.tenant, row.version) for row in rows]
