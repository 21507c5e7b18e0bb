from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from loramux.adapters import identity
from loramux.registry import names
from loramux.registry import schema as tables
from loramux.registry.database import Database


def test_the_migrations_make_just_the_tables_that_the_code_uses(empty_url: str) -> None:
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
