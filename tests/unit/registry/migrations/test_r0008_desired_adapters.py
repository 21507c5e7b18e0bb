from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, inspect

from loramux.registry.migrations import r0001_names_and_receipts as first
from loramux.registry.migrations import r0008_desired_adapters as eighth
from tests.unit.registry.migrations.test_r0002_sources import run


def test_the_tables_come_and_go(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.begin() as connection:
        run(connection, first, "upgrade")
        before = set(inspect(connection).get_table_names())
        run(connection, eighth, "upgrade")
        added = set(inspect(connection).get_table_names()) - before
        assert added == {"desired_adapters", "desired_revisions"}
        run(connection, eighth, "downgrade")
        assert set(inspect(connection).get_table_names()) == before
    engine.dispose()


def test_it_follows_the_seventh() -> None:
    assert (eighth.revision, eighth.down_revision) == ("0008", "0007")
