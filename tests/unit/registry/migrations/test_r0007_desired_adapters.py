from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, inspect

from loramux.registry.migrations import r0001_names_and_receipts as first
from loramux.registry.migrations import r0007_desired_adapters as seventh
from tests.unit.registry.migrations.test_r0002_sources import run


def test_the_tables_come_and_go(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.begin() as connection:
        run(connection, first, "upgrade")
        before = set(inspect(connection).get_table_names())
        run(connection, seventh, "upgrade")
        added = set(inspect(connection).get_table_names()) - before
        assert added == {"desired_adapters", "desired_revisions"}
        run(connection, seventh, "downgrade")
        assert set(inspect(connection).get_table_names()) == before
    engine.dispose()


def test_it_follows_the_sixth() -> None:
    assert (seventh.revision, seventh.down_revision) == ("0007", "0006")
