from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, inspect

from loramux.registry.migrations import r0006_tenants_audit_usage as sixth
from loramux.registry.migrations import r0007_key_buckets as seventh
from tests.unit.registry.migrations.test_r0002_sources import run


def test_the_column_comes_and_goes(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE api_keys (key_id VARCHAR(16) PRIMARY KEY)")
        for step, columns in (("upgrade", {"key_id", "bucket"}), ("downgrade", {"key_id"})):
            run(connection, seventh, step)
            assert {one["name"] for one in inspect(connection).get_columns("api_keys")} == columns
    engine.dispose()


def test_it_follows_the_sixth() -> None:
    assert (seventh.revision, seventh.down_revision) == ("0007", sixth.revision)
