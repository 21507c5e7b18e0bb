from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, inspect

from loramux.registry.migrations import r0001_names_and_receipts as first
from loramux.registry.migrations import r0002_sources as second
from loramux.registry.migrations import r0003_receipt_parts as third
from loramux.registry.migrations import r0004_recipe_parts as fourth
from loramux.registry.migrations import r0005_keys_and_shares as fifth
from tests.unit.registry.migrations.test_r0002_sources import run


def test_the_tables_come_and_go(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.begin() as connection:
        for migration in (first, second, third, fourth):
            run(connection, migration, "upgrade")
        before = set(inspect(connection).get_table_names())
        run(connection, fifth, "upgrade")
        assert set(inspect(connection).get_table_names()) - before == {"api_keys", "shares"}
        run(connection, fifth, "downgrade")
        assert set(inspect(connection).get_table_names()) == before
    engine.dispose()


def test_it_follows_the_fourth() -> None:
    assert (fifth.revision, fifth.down_revision) == ("0005", fourth.revision)
