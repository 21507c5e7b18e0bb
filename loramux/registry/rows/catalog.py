"""The versions of all adapters at once, with the aliases that select them."""

from __future__ import annotations

from collections import defaultdict

from sqlalchemy import Connection, select

from loramux.registry.names import AdapterName
from loramux.registry.records import CatalogEntry
from loramux.registry.rows.adapters import content_format, modality_of
from loramux.registry.rows.aliases import read_targets
from loramux.registry.schema import adapters, alias_states, contents, tenants, versions


def list_catalog(connection: Connection, *, tenant: str | None, limit: int) -> list[CatalogEntry]:
    """Return the versions by name and age, the newest version of an adapter first."""
    statement = (
        select(
            tenants.c.name.label("tenant"),
            adapters.c.id,
            adapters.c.name,
            versions.c.version,
            versions.c.cid,
            versions.c.signed_by,
            contents.c.size_bytes,
            content_format,
        )
        .select_from(versions)
        .join(adapters)
        .join(tenants)
        .join(contents, contents.c.cid == versions.c.cid)
        .where(versions.c.removed_at.is_(None))
        .order_by(tenants.c.name, adapters.c.name, versions.c.id.desc())
        .limit(limit)
    )
    if tenant is not None:
        statement = statement.where(tenants.c.name == tenant)
    aliases = _aliases(connection)
    return [
        CatalogEntry(
            adapter=AdapterName(row.tenant, row.name),
            version=row.version,
            cid=row.cid,
            size_bytes=row.size_bytes,
            signed_by=row.signed_by,
            aliases=tuple(sorted(aliases.get((row.id, row.version), ()))),
            modality=modality_of(row.content_format),
        )
        for row in connection.execute(statement)
    ]


def _aliases(connection: Connection) -> dict[tuple[int, str], list[str]]:
    """Return the current aliases by adapter and version."""
    found: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for row in connection.execute(select(alias_states).where(alias_states.c.is_current)):
        for target in read_targets(row.targets):
            found[row.adapter_id, target.version].append(row.alias)
    return found
