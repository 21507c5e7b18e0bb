from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, inspect

from loramux.registry.migrations import r0001_names_and_receipts as first
from loramux.registry.migrations import r0002_sources as second
from loramux.registry.migrations import r0003_receipt_parts as third
from loramux.registry.migrations import r0004_recipe_parts as fourth
from tests.unit.registry.migrations.test_r0002_sources import run


def test_the_table_comes_and_goes(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.begin() as connection:
        for migration in (first, second, third):
            run(connection, migration, "upgrade")
        before = set(inspect(connection).get_table_names())
        run(connection, fourth, "upgrade")
        assert set(inspect(connection).get_table_names()) - before == {"recipe_parts"}
        run(connection, fourth, "downgrade")
        assert set(inspect(connection).get_table_names()) == before
    engine.dispose()


def test_it_follows_the_third() -> None:
    assert (fourth.revision, fourth.down_revision) == ("0004", third.revision)
