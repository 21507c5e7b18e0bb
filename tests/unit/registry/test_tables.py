from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from loramux.registry import migrate
from loramux.registry import schema as tables
from loramux.registry.database import Database


def test_the_migrations_make_just_the_tables_that_the_code_uses(empty_url: str) -> None:
    database = Database(empty_url)
    options = {"version_table": migrate.VERSION_TABLE, "compare_type": True}
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.metadata) == []
    database.close()


def test_content_ids_and_names_fit_their_columns() -> None:
    from loramux.registry import names, semantic_version

    assert tables.versions.c.cid.type.length == len(names.CID_PREFIX) + names.DIGEST_DIGITS  # type: ignore[attr-defined]
    assert tables.adapters.c.name.type.length == names.MAX_NAME_CHARACTERS  # type: ignore[attr-defined]
    assert tables.alias_states.c.alias.type.length == names.MAX_ALIAS_CHARACTERS  # type: ignore[attr-defined]
    assert tables.versions.c.version.type.length == semantic_version.MAX_CHARACTERS  # type: ignore[attr-defined]
