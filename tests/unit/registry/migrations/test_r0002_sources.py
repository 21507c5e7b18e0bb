from __future__ import annotations

from pathlib import Path
from types import ModuleType

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect, text

from loramux.registry.migrations import r0001_names_and_receipts as first
from loramux.registry.migrations import r0002_sources as second

ROWS = (
    "INSERT INTO tenants (id, name, created_at) VALUES (1, 'a', 0)",
    "INSERT INTO contents (cid, manifest, size_bytes, created_at) VALUES ('c', '{}', 1, 0)",
    "INSERT INTO adapters (id, tenant_id, name, revision, created_at) VALUES (1, 1, 'b', 0, 0)",
    "INSERT INTO versions (adapter_id, version, cid, created_at) VALUES (1, '1.0.0', 'c', 0)",
)


def run(connection: Connection, migration: ModuleType, step: str) -> None:
    with Operations.context(MigrationContext.configure(connection)):
        getattr(migration, step)()


def columns(connection: Connection) -> set[str]:
    return {column["name"] for column in inspect(connection).get_columns("versions")}


def test_existing_versions_have_no_source(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'registry.db'}")
    with engine.begin() as connection:
        run(connection, first, "upgrade")
        for row in ROWS:
            connection.execute(text(row))
        before = columns(connection)
        run(connection, second, "upgrade")
        found = connection.execute(text("SELECT version, source FROM versions")).all()
        assert found == [("1.0.0", None)]
        run(connection, second, "downgrade")
        assert columns(connection) == before
    engine.dispose()


def test_it_follows_the_first() -> None:
    assert (second.revision, second.down_revision) == ("0002", first.revision)
