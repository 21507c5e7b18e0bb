"""The desired adapters of fleets, as records of the registry that several routers change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update

from loramux.registry.database import Database, insert_into
from loramux.registry.schema import desired_adapters, desired_revisions
from loramux.types.desired import Desired, DesiredAdapter, DesiredConflict, DesiredState

MAX_GONE = 1000
"""Unloaded adapters that a fleet remembers, the newest ones."""


class DesiredRecords:
    """The desired adapters of one fleet."""

    is_shared = True

    def __init__(
        self, database: Database, fleet: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._fleet = fleet
        self._clock = clock

    def revision(self) -> int:
        with self._database.reading() as connection:
            return self._revision(connection)

    def read(self) -> Desired:
        statement = select(desired_adapters).where(desired_adapters.c.fleet == self._fleet)
        with self._database.reading() as connection:
            revision = self._revision(connection)
            found = map(_adapter, connection.execute(statement))
            return Desired(revision, {one.name: one for one in found})

    def write(self, adapter: DesiredAdapter, *, if_revision: int) -> DesiredAdapter:
        """Record an adapter; raises DesiredConflict if its revision is another one (0: absent)."""
        with self._database.writing() as connection:
            revision = self._next_revision(connection)
            where = (desired_adapters.c.fleet == self._fleet) & (
                desired_adapters.c.name == adapter.name
            )
            current = connection.scalar(select(desired_adapters.c.revision).where(where))
            if (current or 0) != if_revision:
                raise DesiredConflict(adapter.name)
            changed = replace(adapter, revision=revision, changed_at=self._clock())
            values = {
                name: getattr(changed, name) for name in _COLUMNS if name not in ("fleet", "name")
            }
            values["state"] = changed.state.value
            if current is None:
                statement = insert_into(connection, desired_adapters)
                connection.execute(statement.values(fleet=self._fleet, name=adapter.name, **values))
            else:
                connection.execute(update(desired_adapters).where(where).values(**values))
            self._prune(connection)
            return changed

    def _revision(self, connection: Connection) -> int:
        statement = select(desired_revisions.c.revision)
        found = connection.scalar(statement.where(desired_revisions.c.fleet == self._fleet))
        return int(found or 0)

    def _next_revision(self, connection: Connection) -> int:
        """Count up; the row is locked until the commit, and so changes are serialized."""
        table = desired_revisions
        first = insert_into(connection, table).values(fleet=self._fleet, revision=0)
        connection.execute(first.on_conflict_do_nothing())
        where = table.c.fleet == self._fleet
        connection.execute(update(table).where(where).values(revision=table.c.revision + 1))
        return self._revision(connection)

    def _prune(self, connection: Connection) -> None:
        table = desired_adapters
        gone = (table.c.fleet == self._fleet) & (table.c.state == DesiredState.GONE.value)
        newest = select(table.c.revision).where(gone).order_by(table.c.revision.desc())
        oldest_kept = connection.scalar(newest.offset(MAX_GONE - 1).limit(1))
        if oldest_kept is not None:
            connection.execute(delete(table).where(gone, table.c.revision < oldest_kept))


_COLUMNS = tuple(column.name for column in desired_adapters.columns)


def _adapter(row: Row[Any]) -> DesiredAdapter:
    return DesiredAdapter(
        name=row.name,
        state=DesiredState(row.state),
        source=row.source,
        cid=row.cid,
        previous_source=row.previous_source,
        previous_cid=row.previous_cid,
        revision=row.revision,
        changed_at=row.changed_at,
    )
