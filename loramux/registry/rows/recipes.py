"""Queries of the parts of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, select

from loramux.adapters.recipe import Recipe, decode_recipe
from loramux.base.canonical_json import canonical_json
from loramux.errors import RegistryConflict
from loramux.registry.database import insert_into
from loramux.registry.names import AdapterName
from loramux.registry.records import RecipePart, VersionRecipe
from loramux.registry.schema import adapters, contents, recipe_parts, tenants, versions

owners = versions.alias("owners")


def set_parts(connection: Connection, version_id: int, part_ids: Sequence[int]) -> None:
    connection.execute(delete(recipe_parts).where(recipe_parts.c.version_id == version_id))
    if part_ids:
        rows = [{"version_id": version_id, "part_id": part_id} for part_id in part_ids]
        connection.execute(insert_into(connection, recipe_parts), rows)


def recipes_of(connection: Connection, matches: ColumnElement[bool]) -> dict[int, VersionRecipe]:
    """Return the recipes of the versions that match a condition on `owners`, by id."""
    statement = (
        select(owners.c.id, contents.c.manifest)
        .select_from(owners)
        .join(contents, contents.c.cid == owners.c.cid)
        .where(matches, owners.c.id.in_(select(recipe_parts.c.version_id)))
    )
    manifests = {row.id: row.manifest for row in connection.execute(statement)}
    if not manifests:
        return {}
    named: dict[int, dict[str, Row[Any]]] = {version_id: {} for version_id in manifests}
    for row in connection.execute(_parts().where(matches)):
        named[row.version_id][row.cid] = row
    return {
        version_id: _version_recipe(decode_recipe(canonical_json(manifest)), named[version_id])
        for version_id, manifest in manifests.items()
    }


def recipe_of(connection: Connection, version_id: int) -> VersionRecipe | None:
    return recipes_of(connection, owners.c.id == version_id).get(version_id)


def recipe_cids(connection: Connection) -> set[str]:
    """Return the CIDs of all recipes, also of removed ones."""
    statement = select(versions.c.cid).join(
        recipe_parts, recipe_parts.c.version_id == versions.c.id
    )
    return set(connection.scalars(statement.distinct()))


def broken_recipes(connection: Connection) -> list[tuple[str, str]]:
    """Return the names of each recipe with a removed part, and of that part."""
    statement = _parts().where(owners.c.removed_at.is_(None), versions.c.removed_at.is_not(None))
    return [
        (_name_of(connection, row.version_id), f"{row.tenant}/{row.name}@{row.version}")
        for row in connection.execute(statement.order_by(recipe_parts.c.version_id))
    ]


def refuse_broken(connection: Connection) -> None:
    """Raise RegistryConflict if a recipe has lost a part."""
    broken = broken_recipes(connection)
    if broken:
        recipe, part = broken[0]
        raise RegistryConflict(
            f"{part} is a part of the recipe {recipe}. Remove the recipe first; content that is in "
            "use is never removed."
        )


def _parts() -> Any:
    """Select the parts of recipes with their names."""
    return (
        select(
            recipe_parts.c.version_id,
            versions.c.cid,
            versions.c.version,
            adapters.c.name,
            tenants.c.name.label("tenant"),
        )
        .select_from(recipe_parts)
        .join(owners, owners.c.id == recipe_parts.c.version_id)
        .join(versions, versions.c.id == recipe_parts.c.part_id)
        .join(adapters, adapters.c.id == versions.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
    )


def _version_recipe(recipe: Recipe, named: dict[str, Row[Any]]) -> VersionRecipe:
    rows = [(part, named[part.cid]) for part in recipe.parts]
    return VersionRecipe(
        recipe,
        tuple(
            RecipePart(part.cid, part.weight, AdapterName(row.tenant, row.name), row.version)
            for part, row in rows
        ),
    )


def _name_of(connection: Connection, version_id: int) -> str:
    statement = (
        select(tenants.c.name, adapters.c.name, versions.c.version)
        .select_from(versions)
        .join(adapters, adapters.c.id == versions.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .where(versions.c.id == version_id)
    )
    tenant, name, version = connection.execute(statement).one()
    return f"{tenant}/{name}@{version}"
