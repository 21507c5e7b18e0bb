"""Queries of aliases and their states, of which at most one is current."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from loramux.errors import RegistryConflict
from loramux.registry.names import AdapterName
from loramux.registry.records import AliasAction, AliasState, Target
from loramux.registry.schema import alias_states

columns = alias_states.c


def current_row(connection: Connection, adapter_id: int, alias: str) -> Row[Any] | None:
    """Return the current state; that of a removed alias has no targets."""
    statement = select(alias_states).where(
        columns.adapter_id == adapter_id, columns.alias == alias, columns.is_current
    )
    return connection.execute(statement).one_or_none()


def current_targets(connection: Connection, adapter_id: int, alias: str) -> tuple[Target, ...]:
    """Return the targets of an alias; none if it does not exist."""
    row = current_row(connection, adapter_id, alias)
    return () if row is None else read_targets(row.targets)


def list_aliases(connection: Connection, adapter_id: int) -> list[AliasState]:
    statement = select(alias_states).where(columns.adapter_id == adapter_id, columns.is_current)
    states = [alias_state(row) for row in connection.execute(statement.order_by(columns.alias))]
    return [state for state in states if state.targets]


def alias_history(connection: Connection, adapter_id: int, alias: str) -> list[AliasState]:
    """Return all states, the newest first."""
    statement = select(alias_states).where(columns.adapter_id == adapter_id, columns.alias == alias)
    rows = connection.execute(statement.order_by(columns.revision.desc()))
    return [alias_state(row) for row in rows]


def row_of(connection: Connection, adapter_id: int, alias: str, revision: int) -> Row[Any]:
    statement = select(alias_states).where(
        columns.adapter_id == adapter_id, columns.alias == alias, columns.revision == revision
    )
    return connection.execute(statement).one()


def current_and_previous(
    connection: Connection, adapter: AdapterName, adapter_id: int, alias: str
) -> tuple[Row[Any], Row[Any]]:
    """Return the current state and the state that a rollback would restore."""
    current = current_row(connection, adapter_id, alias)
    if current is None or current.parent_revision is None:
        raise RegistryConflict(f"{adapter}@{alias} has no earlier state.")
    return current, row_of(connection, adapter_id, alias, current.parent_revision)


def add_state(
    connection: Connection,
    current: Row[Any] | None,
    *,
    adapter_id: int,
    parent_revision: int | None,
    state: AliasState,
) -> None:
    if current is not None:
        old = update(alias_states).where(columns.id == current.id)
        connection.execute(old.values(is_current=False))
    connection.execute(
        insert(alias_states).values(
            adapter_id=adapter_id,
            alias=state.alias,
            revision=state.revision,
            parent_revision=parent_revision,
            action=state.action.value,
            targets=[[target.version, target.weight] for target in state.targets],
            created_at=state.created_at,
            is_current=True,
        )
    )


def refuse_stale(
    adapter: AdapterName, alias: str, current: Row[Any] | None, if_revision: int | None
) -> None:
    revision = 0 if current is None else current.revision
    if if_revision is not None and revision != if_revision:
        raise RegistryConflict(
            f"{adapter}@{alias} is at revision {revision}, not {if_revision}: it was "
            "moved meanwhile. Check it again before you move it."
        )


def alias_state(row: Row[Any]) -> AliasState:
    return AliasState(
        alias=row.alias,
        revision=row.revision,
        action=AliasAction(row.action),
        targets=read_targets(row.targets),
        created_at=row.created_at,
    )


def read_targets(value: list[list[Any]]) -> tuple[Target, ...]:
    return tuple(Target(version, weight) for version, weight in value)
