"""The schema of a database brought to what this version of the program expects."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from loramux.errors import RegistryUnavailable
from loramux.registry import schema as tables

FOLDER = Path(__file__).parent / "migrations"
# Not alembic's own default, so that another program's migrations may share the database.
VERSION_TABLE = "loramux_registry_schema"
# alembic keeps the migration that runs in a global of the process.
ALEMBIC_LOCK = threading.Lock()


def open_scripts() -> ScriptDirectory:
    return ScriptDirectory(str(FOLDER), version_locations=[str(FOLDER)])


def is_current(connection: Connection) -> bool:
    """Raises RegistryUnavailable for a schema that a later loramux has made."""
    scripts = open_scripts()
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found = context.get_current_revision()
    try:
        scripts.get_revision(found or "base")
    except CommandError as error:
        raise RegistryUnavailable(
            f"The registry's database has schema {found}, which this version of loramux does not "
            "know. Upgrade loramux."
        ) from error
    return found == scripts.get_current_head()


def upgrade(connection: Connection) -> None:
    """Inside the caller's transaction, which must keep others from doing the same."""
    scripts = open_scripts()

    def steps(found: Any, _: MigrationContext) -> Any:
        return scripts._upgrade_revs("head", found)

    with ALEMBIC_LOCK, EnvironmentContext(Config(), scripts, fn=steps) as environment:
        environment.configure(
            connection=connection, target_metadata=tables.metadata, version_table=VERSION_TABLE
        )
        environment.run_migrations()
