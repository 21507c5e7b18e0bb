"""Resolves references to CIDs, and chooses a version of a split alias."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, or_, select

from loramux.adapters.identity import CID_PREFIX, is_digest
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.registry.names import (
    LATEST,
    PROD,
    AdapterName,
    CidReference,
    NameReference,
    Reference,
)
from loramux.registry.records import ALL_TENANTS, Resolved, Target
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import aliases as alias_rows
from loramux.registry.rows import recipes as recipe_rows
from loramux.registry.schema import adapters, shares, tenants, versions

MAX_WEIGHT = 1_000_000
MAX_TARGETS = 16
DIGEST_BITS = 64
# Versions that are looked at for one content id.
MAX_SAME_CID = 1000


def choose(targets: Iterable[tuple[str, int]], *, salt: str, key: str) -> str:
    """Chooses a target by weighted rendezvous hashing.

    A change of one target's weight moves keys only to or from this target, and the order of the
    targets has no effect.
    """
    return max((score(salt, key, version, weight), version) for version, weight in targets)[1]


def score(salt: str, key: str, version: str, weight: int) -> float:
    text = "\0".join((salt, version, key))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    # In the open interval (0, 1), so that the logarithm is finite and not zero.
    uniform = (int.from_bytes(digest[: DIGEST_BITS // 8], "big") >> 11) + 0.5
    return -weight / math.log(uniform / 2.0**53)


def check_targets(weights: Iterable[tuple[str, int]]) -> tuple[Target, ...]:
    targets = tuple(Target(version, weight) for version, weight in sorted(weights))
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise InvalidRequest(f"A split has 1 to {MAX_TARGETS} versions, not {len(targets)}.")
    for target in targets:
        if type(target.weight) is not int or not 1 <= target.weight <= MAX_WEIGHT:
            raise InvalidRequest(
                f"The weight of {target.version} must be an integer from 1 to {MAX_WEIGHT}, such "
                f"as 90 beside 10; found {target.weight!r}."
            )
    return targets


@dataclass(frozen=True, slots=True)
class Choice:
    """One CID of a route and its weight."""

    resolved: Resolved
    weight: int


@dataclass(frozen=True, slots=True)
class Route:
    """The CIDs that a reference may resolve to; more than one only for a split alias."""

    adapter: AdapterName | None
    choices: tuple[Choice, ...]

    def choose(self, sticky_key: str) -> Resolved:
        if len(self.choices) == 1:
            return self.choices[0].resolved
        by_version = {str(choice.resolved.version): choice for choice in self.choices}
        weights = [(version, choice.weight) for version, choice in by_version.items()]
        version = choose(weights, salt=str(self.adapter), key=sticky_key)
        return by_version[version].resolved


def find_route(connection: Connection, reference: Reference) -> Route:
    """Return the route of a reference; raise AdapterNotFound."""
    if isinstance(reference, CidReference):
        return route_of_cid(connection, reference)
    return route_of_name(connection, reference)


def route_of_name(connection: Connection, reference: NameReference) -> Route:
    adapter = reference.adapter
    row = adapter_rows.get_adapter(connection, adapter)
    alias, targets = find_targets(connection, row, reference)
    choices = []
    for target in targets:
        found = adapter_rows.get_version(connection, row, adapter, target.version)
        recipe = recipe_rows.recipe_of(connection, found.id)
        resolved = Resolved(
            cid=found.cid,
            tenant=adapter.tenant,
            name=adapter.name,
            version=found.version,
            alias=alias,
            base_model=found.base_model,
            recipe=recipe,
            signed_by=found.signed_by,
            modality=adapter_rows.find_modality(connection, found.cid, recipe),
        )
        choices.append(Choice(resolved, target.weight))
    return Route(adapter, tuple(choices))


def find_targets(
    connection: Connection, row: adapter_rows.AdapterRow, reference: NameReference
) -> tuple[str | None, tuple[Target, ...]]:
    """Return the alias and its targets; a plain name means `prod`, or `latest` without one."""
    if reference.version is not None:
        return None, (Target(str(reference.version)),)
    if reference.alias != LATEST:
        alias = reference.alias or PROD
        targets = alias_rows.current_targets(connection, row.id, alias)
        if targets:
            return alias, targets
        if reference.alias is not None:
            raise no_alias(connection, row, reference)
    return LATEST, (Target(row.latest),)


def no_alias(
    connection: Connection, row: adapter_rows.AdapterRow, reference: NameReference
) -> AdapterNotFound:
    known = [state.alias for state in alias_rows.list_aliases(connection, row.id)]
    return AdapterNotFound(
        f"{reference.adapter} has no alias {reference.alias}; it has {', '.join([*known, LATEST])}."
    )


def route_of_cid(connection: Connection, reference: CidReference) -> Route:
    start = CID_PREFIX + reference.digest_start
    is_whole = is_digest(reference.digest_start)
    matches = versions.c.cid == start if is_whole else versions.c.cid.startswith(start)
    is_live = versions.c.removed_at.is_(None)
    statement = select(versions.c.cid, func.min(versions.c.id)).where(matches, is_live)
    found = connection.execute(statement.group_by(versions.c.cid).limit(2)).all()
    if not found:
        raise AdapterNotFound(f"No version in the registry has the content id {start}.")
    if len(found) > 1:
        raise InvalidRequest(f"Several content ids begin with {start}. Give more digits.")
    cid, version_id = found[0]
    recipe = recipe_rows.recipe_of(connection, version_id)
    resolved = Resolved(
        cid=cid,
        recipe=None if recipe is None else recipe.without_names(),
        modality=adapter_rows.find_modality(connection, cid, recipe),
    )
    return Route(None, (Choice(resolved, 1),))


def versions_of_cid(
    connection: Connection, reference: CidReference, tenant: str | None
) -> list[tuple[AdapterName, Resolved]]:
    """Return the versions with a CID that belong to a tenant or are shared with it; None: all."""
    start = CID_PREFIX + reference.digest_start
    is_whole = is_digest(reference.digest_start)
    statement = (
        select(versions, adapters.c.name, tenants.c.name.label("tenant"))
        .select_from(versions)
        .join(adapters, adapters.c.id == versions.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .where(versions.c.cid == start if is_whole else versions.c.cid.startswith(start))
        .where(versions.c.removed_at.is_(None))
    )
    if tenant is not None:
        share = select(shares.c.adapter_id).where(
            shares.c.adapter_id == versions.c.adapter_id,
            shares.c.tenant.in_((tenant, ALL_TENANTS)),
            shares.c.version.in_(("", versions.c.version)),
        )
        statement = statement.where(or_(tenants.c.name == tenant, share.exists()))
    rows = list(connection.execute(statement.order_by(versions.c.id).limit(MAX_SAME_CID)))
    return [(AdapterName(row.tenant, row.name), _resolved_row(connection, row)) for row in rows]


def _resolved_row(connection: Connection, row: Row[Any]) -> Resolved:
    recipe = recipe_rows.recipe_of(connection, row.id)
    return Resolved(
        cid=row.cid,
        version=row.version,
        recipe=recipe,
        modality=adapter_rows.find_modality(connection, row.cid, recipe),
    )
