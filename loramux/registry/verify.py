"""Checks the invariants of the registry that the database does not enforce."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, select

from loramux.registry.names import highest
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import aliases as alias_rows
from loramux.registry.rows import recipes as recipe_rows
from loramux.registry.schema import adapters, alias_states, registry_state, versions


def find_faults(connection: Connection) -> Iterator[str]:
    last = connection.scalar(select(registry_state.c.revision))
    for row in connection.execute(select(adapters)):
        latest = highest(adapter_rows.live_versions(connection, row.id))
        if row.latest != (None if latest is None else str(latest)):
            yield f"{row.name}: latest is {row.latest}, the highest version is {latest}."
        if last is None or row.revision > last:
            yield f"{row.name}: changed at {row.revision}, after the last change, {last}."
        yield from alias_faults(connection, row)
    yield from history_faults(connection)
    for recipe, part in recipe_rows.broken_recipes(connection):
        yield f"The recipe {recipe} needs {part}, which was removed."


def alias_faults(connection: Connection, row: adapter_rows.AdapterRow) -> Iterator[str]:
    statement = select(versions.c.version).where(
        versions.c.adapter_id == row.id, versions.c.removed_at.is_(None)
    )
    live = set(connection.scalars(statement))
    for state in alias_rows.list_aliases(connection, row.id):
        for target in state.targets:
            if target.version not in live:
                yield f"{row.name}@{state.alias} names {target.version}, which does not exist."


def history_faults(connection: Connection) -> Iterator[str]:
    """Check that revisions count from 1 without a gap, and that the last one is current."""
    columns = alias_states.c
    statement = select(columns.adapter_id, columns.alias, columns.revision, columns.is_current)
    groups: dict[tuple[int, str], list[tuple[int, bool]]] = {}
    for adapter_id, alias, revision, is_current in connection.execute(statement):
        groups.setdefault((adapter_id, alias), []).append((revision, is_current))
    for (_, alias), states in groups.items():
        states.sort()
        expected = [(number, number == len(states)) for number in range(1, len(states) + 1)]
        if states != expected:
            yield f"The history of the alias {alias} is broken: {states}."
