from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from loramux.errors import RegistryConflict
from loramux.registry.database import Database
from loramux.registry.names import AdapterName
from loramux.registry.records import AliasAction, AliasState, Target
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import aliases as alias_rows

SQL = AdapterName("alice", "sql")
OLD, NEW = (Target("1.0.0"),), (Target("1.0.0", 90), Target("2.0.0", 10))


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    database = Database(database_url)
    with database.writing() as connection:
        yield connection
    database.close()


@pytest.fixture
def adapter_id(connection: Connection) -> int:
    return int(adapter_rows.make_adapter(connection, SQL, revision=1, now=0.0).id)


def state(revision: int, targets: tuple[Target, ...], alias: str = "prod") -> AliasState:
    action = AliasAction.SPLIT if len(targets) > 1 else AliasAction.PROMOTE
    return AliasState(
        alias=alias, revision=revision, action=action, targets=targets, created_at=float(revision)
    )


def add(connection: Connection, adapter_id: int, new: AliasState) -> None:
    current = alias_rows.current_row(connection, adapter_id, new.alias)
    parent = None if current is None else current.revision
    alias_rows.add_state(
        connection, current, adapter_id=adapter_id, parent_revision=parent, state=new
    )


def test_the_newest_state_is_current_and_the_older_ones_stay(
    connection: Connection, adapter_id: int
) -> None:
    assert alias_rows.current_targets(connection, adapter_id, "prod") == ()
    add(connection, adapter_id, state(1, OLD))
    add(connection, adapter_id, state(2, NEW))
    assert alias_rows.current_targets(connection, adapter_id, "prod") == NEW
    history = alias_rows.alias_history(connection, adapter_id, "prod")
    assert history == [state(2, NEW), state(1, OLD)]
    assert alias_rows.row_of(connection, adapter_id, "prod", 2).parent_revision == 1


def test_a_removed_alias_is_not_listed(connection: Connection, adapter_id: int) -> None:
    add(connection, adapter_id, state(1, OLD))
    add(connection, adapter_id, state(1, OLD, alias="canary"))
    add(connection, adapter_id, state(2, ()))
    assert alias_rows.list_aliases(connection, adapter_id) == [state(1, OLD, alias="canary")]


def test_the_database_itself_refuses_two_current_states(
    connection: Connection, adapter_id: int
) -> None:
    add(connection, adapter_id, state(1, OLD))
    with pytest.raises(IntegrityError), connection.begin_nested():
        alias_rows.add_state(
            connection, None, adapter_id=adapter_id, parent_revision=None, state=state(2, NEW)
        )


@pytest.mark.parametrize("expected", [None, 1])
def test_the_current_revision_may_move_an_alias(
    connection: Connection, adapter_id: int, expected: int | None
) -> None:
    add(connection, adapter_id, state(1, OLD))
    current = alias_rows.current_row(connection, adapter_id, "prod")
    alias_rows.refuse_stale(SQL, "prod", current, expected)


def test_an_older_revision_may_not(connection: Connection, adapter_id: int) -> None:
    alias_rows.refuse_stale(SQL, "prod", None, 0)
    with pytest.raises(RegistryConflict, match="at revision 0, not 3"):
        alias_rows.refuse_stale(SQL, "prod", None, 3)
    add(connection, adapter_id, state(1, OLD))
    current = alias_rows.current_row(connection, adapter_id, "prod")
    with pytest.raises(RegistryConflict, match="at revision 1, not 0"):
        alias_rows.refuse_stale(SQL, "prod", current, 0)
