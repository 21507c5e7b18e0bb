from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from loramux.adapters import identity
from loramux.errors import RegistryUnavailable
from loramux.registry import names, schema
from loramux.registry import schema as tables
from loramux.registry.database import Database
from loramux.registry.registry import Registry
from tests.registry_factory import make_content


def test_the_migrations_create_exactly_the_tables_of_the_code(empty_url: str) -> None:
    database = Database(empty_url)
    options = {"version_table": tables.VERSION_TABLE, "compare_type": True}
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.metadata) == []
    database.close()


def test_content_ids_and_names_fit_their_columns() -> None:

    assert tables.versions.c.cid.type.length == len(identity.CID_PREFIX) + identity.DIGEST_DIGITS  # type: ignore[attr-defined]
    assert tables.adapters.c.name.type.length == names.MAX_NAME_CHARACTERS  # type: ignore[attr-defined]
    assert tables.alias_states.c.alias.type.length == names.MAX_ALIAS_CHARACTERS  # type: ignore[attr-defined]
    assert tables.versions.c.version.type.length == names.MAX_VERSION_CHARACTERS  # type: ignore[attr-defined]


def test_a_second_opening_finds_the_schema_and_keeps_the_rows(empty_url: str) -> None:
    with Registry(empty_url) as registry:
        registry.push("a/b@1.0.0", make_content())
    with Registry(empty_url) as registry:
        assert registry.resolve("a/b").version == "1.0.0"


def test_a_newer_schema_is_refused(empty_url: str) -> None:
    database = Database(empty_url)
    with database.writing() as connection:
        connection.execute(text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'"))
    database.close()
    with pytest.raises(RegistryUnavailable, match="schema 9999.*Upgrade loramux"):
        Database(empty_url)


def test_a_migration_that_fails_leaves_nothing_behind(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_after_all_steps(connection: object) -> None:
        upgrade(connection)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    upgrade = schema.upgrade
    monkeypatch.setattr(schema, "upgrade", fail_after_all_steps)
    with pytest.raises(KeyboardInterrupt):
        Database(empty_url)
    monkeypatch.undo()
    database = Database(empty_url)
    with database.reading() as connection:
        assert connection.execute(text("SELECT revision FROM registry_state")).all() == [(0,)]
    database.close()


def test_programs_that_start_together_on_an_empty_database_agree(empty_url: str) -> None:
    together = Barrier(4)

    def open_once(_: int) -> int:
        together.wait()
        with Registry(empty_url) as registry:
            return len(registry.adapters())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(open_once, range(4))) == [0, 0, 0, 0]
