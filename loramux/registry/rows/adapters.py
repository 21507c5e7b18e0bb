"""Queries of adapters and their versions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select, update

from loramux.adapters.images.files import FORMAT as IMAGE_FORMAT
from loramux.errors import AdapterNotFound, RegistryConflict
from loramux.registry.database import insert_into
from loramux.registry.names import (
    FIRST_VERSION,
    AdapterName,
    SemanticVersion,
    highest,
    parse_version,
)
from loramux.registry.records import Content, VersionInfo, VersionRecipe
from loramux.registry.rows.recipes import owners, recipes_of
from loramux.registry.schema import adapters, contents, registry_state, tenants, versions
from loramux.types.modality import Modality

AdapterRow = Row[Any]


content_format = contents.c.manifest["format"].as_string().label("content_format")
"""The format of a version's manifest, which tells what the adapter is for."""


def modality_of(manifest_format: str | None) -> Modality:
    return "image" if manifest_format == IMAGE_FORMAT else "text"


def find_modality(
    connection: Connection, cid: str, recipe: VersionRecipe | None = None
) -> Modality:
    """Return what an adapter is for, of a recipe its first part; text for an unknown CID."""
    used = cid if recipe is None else recipe.parts[0].cid
    statement = select(content_format).where(contents.c.cid == used)
    return modality_of(connection.scalar(statement))


def begin_change(connection: Connection) -> int:
    """Begins a change and returns its revision; other changes block until it ends."""
    statement = update(registry_state).values(revision=registry_state.c.revision + 1)
    return int(connection.execute(statement.returning(registry_state.c.revision)).scalar_one())


def find_adapter(connection: Connection, adapter: AdapterName) -> AdapterRow | None:
    statement = (
        select(adapters)
        .join(tenants)
        .where(tenants.c.name == adapter.tenant, adapters.c.name == adapter.name)
    )
    return connection.execute(statement).one_or_none()


def get_adapter(connection: Connection, adapter: AdapterName) -> AdapterRow:
    row = find_adapter(connection, adapter)
    if row is None or row.latest is None:
        raise AdapterNotFound(f"No adapter {adapter} is in the registry. Push it first.")
    return row


def make_adapter(
    connection: Connection, adapter: AdapterName, *, revision: int, now: float
) -> AdapterRow:
    """Return the row of the adapter, and create it if needed."""
    row = find_adapter(connection, adapter)
    if row is not None:
        return row
    tenant = insert_into(connection, tenants).values(name=adapter.tenant, created_at=now)
    connection.execute(tenant.on_conflict_do_nothing())
    tenant_id = select(tenants.c.id).where(tenants.c.name == adapter.tenant).scalar_subquery()
    values = {"tenant_id": tenant_id, "name": adapter.name, "revision": revision}
    connection.execute(insert_into(connection, adapters).values(**values, created_at=now))
    row = find_adapter(connection, adapter)
    assert row is not None
    return row


def find_version(connection: Connection, adapter_id: int, version: str) -> Row[Any] | None:
    """Return the row of a version, also of a removed one."""
    statement = select(versions).where(
        versions.c.adapter_id == adapter_id, versions.c.version == version
    )
    return connection.execute(statement).one_or_none()


def get_version(
    connection: Connection, row: AdapterRow, adapter: AdapterName, version: str
) -> Row[Any]:
    found = find_version(connection, row.id, version)
    if found is None or found.removed_at is not None:
        state = "has no" if found is None else "no longer has"
        raise AdapterNotFound(f"{adapter} {state} version {version}; its latest is {row.latest}.")
    return found


def add_version(
    connection: Connection, row: AdapterRow, version: str, content: Content, *, now: float
) -> None:
    values = {"cid": content.cid, "manifest": dict(content.manifest)}
    statement = insert_into(connection, contents).values(
        **values, size_bytes=content.size_bytes, created_at=now
    )
    connection.execute(statement.on_conflict_do_nothing())
    names = {"adapter_id": row.id, "version": version, "cid": content.cid}
    connection.execute(
        insert_into(connection, versions).values(
            **names, **_provenance(content), base_model=content.base_model, created_at=now
        )
    )


def _provenance(content: Content) -> dict[str, object]:
    verified = content.verified
    return {
        "source": content.source,
        "pushed_by": content.pushed_by,
        "signed_by": None if verified is None else verified.key_id,
        "signature": None if verified is None else verified.signature,
    }


def set_provenance(connection: Connection, version_id: int, content: Content) -> None:
    """Replace what the content says of source, signature and API key; all else stays."""
    values = {name: value for name, value in _provenance(content).items() if value is not None}
    if values:
        statement = update(versions).where(versions.c.id == version_id)
        connection.execute(statement.values(**values))


def set_removed(connection: Connection, version_ids: list[int], removed_at: float | None) -> None:
    statement = update(versions).where(versions.c.id.in_(version_ids))
    connection.execute(statement.values(removed_at=removed_at))


def touch_adapter(connection: Connection, adapter_id: int, *, revision: int) -> None:
    """Update the revision and the latest version of an adapter."""
    latest = highest(live_versions(connection, adapter_id))
    values = {"revision": revision, "latest": None if latest is None else str(latest)}
    connection.execute(update(adapters).where(adapters.c.id == adapter_id).values(**values))


def live_versions(connection: Connection, adapter_id: int) -> list[SemanticVersion]:
    statement = select(versions.c.version).where(
        versions.c.adapter_id == adapter_id, versions.c.removed_at.is_(None)
    )
    return [parse_version(version) for version in connection.scalars(statement)]


def next_version(connection: Connection, adapter_id: int) -> SemanticVersion:
    """Return a version higher than all present and removed ones."""
    statement = select(versions.c.version).where(versions.c.adapter_id == adapter_id)
    known = [parse_version(version) for version in connection.scalars(statement)]
    return max(known).next_patch() if known else FIRST_VERSION


def refuse_other_content(adapter: AdapterName, found: Row[Any], content: Content) -> None:
    if found.cid != content.cid:
        raise RegistryConflict(
            f"{adapter}@{found.version} exists with other content ({found.cid}). Versions never "
            "change, not even removed ones: push under a new number."
        )


def list_versions(connection: Connection, adapter: AdapterName) -> list[VersionInfo]:
    """Return the versions, the highest first."""
    rows = connection.execute(
        select(versions, contents.c.size_bytes)
        .join(contents)
        .join(adapters)
        .join(tenants)
        .where(tenants.c.name == adapter.tenant, adapters.c.name == adapter.name)
        .where(versions.c.removed_at.is_(None))
    )
    found_rows = list(rows)
    adapter_ids = {row.adapter_id for row in found_rows}
    recipes = recipes_of(connection, owners.c.adapter_id.in_(adapter_ids))
    found = [
        version_info(connection, adapter, row, row.size_bytes, recipes.get(row.id))
        for row in found_rows
    ]
    return sorted(found, key=lambda info: parse_version(info.version), reverse=True)


def version_info(
    connection: Connection,
    adapter: AdapterName,
    row: Row[Any],
    size_bytes: int,
    recipe: VersionRecipe | None,
) -> VersionInfo:
    return VersionInfo(
        adapter=adapter,
        version=row.version,
        cid=row.cid,
        size_bytes=size_bytes,
        base_model=row.base_model,
        created_at=row.created_at,
        recipe=recipe,
        source=row.source,
        pushed_by=row.pushed_by,
        signed_by=row.signed_by,
        modality=find_modality(connection, row.cid, recipe),
    )


def list_adapters(connection: Connection, tenant: str | None) -> list[AdapterName]:
    """Return the adapters that have a version."""
    statement = select(tenants.c.name, adapters.c.name).select_from(adapters).join(tenants)
    if tenant is not None:
        statement = statement.where(tenants.c.name == tenant)
    rows = connection.execute(statement.where(adapters.c.latest.is_not(None)))
    return sorted(AdapterName(row[0], row[1]) for row in rows)


def newest_revision(connection: Connection) -> int:
    last: int | None = connection.scalar(select(registry_state.c.revision))
    assert last is not None
    return last


def changed_since(connection: Connection, revision: int) -> tuple[int, list[AdapterName]]:
    """Return the last revision, and the adapters changed after `revision`, oldest first."""
    last = newest_revision(connection)
    if last <= revision:
        return last, []
    statement = (
        select(tenants.c.name, adapters.c.name)
        .select_from(adapters)
        .join(tenants)
        .where(adapters.c.revision > revision, adapters.c.revision <= last)
        .order_by(adapters.c.revision)
    )
    return last, [AdapterName(row[0], row[1]) for row in connection.execute(statement)]


def named_cids(connection: Connection) -> set[str]:
    statement = select(versions.c.cid).where(versions.c.removed_at.is_(None)).distinct()
    return set(connection.scalars(statement))


def cids_of(connection: Connection, adapter_id: int) -> set[str]:
    """Return the CIDs of all versions, also of removed ones."""
    statement = select(versions.c.cid).where(versions.c.adapter_id == adapter_id)
    return set(connection.scalars(statement))


def names_of(connection: Connection, cid: str) -> list[tuple[AdapterName, str]]:
    statement = (
        select(tenants.c.name, adapters.c.name, versions.c.version)
        .select_from(versions)
        .join(adapters)
        .join(tenants)
        .where(versions.c.cid == cid, versions.c.removed_at.is_(None))
    )
    return sorted((AdapterName(row[0], row[1]), row[2]) for row in connection.execute(statement))


def sources_of(connection: Connection, cid: str) -> list[str]:
    """Return the distinct sources of the versions with this CID, the newest first."""
    statement = (
        select(versions.c.source)
        .where(versions.c.cid == cid, versions.c.source.is_not(None))
        .where(versions.c.removed_at.is_(None))
        .order_by(versions.c.created_at.desc(), versions.c.id.desc())
    )
    return list(dict.fromkeys(connection.scalars(statement)))


def get_manifest(connection: Connection, cid: str) -> dict[str, object] | None:
    """Return a manifest, also of content without a current version."""
    return connection.scalar(select(contents.c.manifest).where(contents.c.cid == cid))
