from __future__ import annotations

from pathlib import Path

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect

from loramux.registry.migrations import r0001_names_and_receipts as first


def run(connection: Connection, step: str) -> None:
    with Operations.context(MigrationContext.configure(connection)):
        getattr(first, step)()


def test_the_downgrade_removes_all_that_the_upgrade_created(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.begin() as connection:
        run(connection, "upgrade")
        assert "receipts" in inspect(connection).get_table_names()
        run(connection, "downgrade")
    assert inspect(engine).get_table_names() == []
    engine.dispose()


def test_it_is_the_first_migration() -> None:
    assert (first.revision, first.down_revision) == ("0001", None)
