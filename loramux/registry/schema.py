"""The tables of the registry and their migrations. Times are seconds since 1970."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

from loramux.errors import RegistryUnavailable

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# One row. A change of names updates it first, so that changes are serialized and become visible
# in the order of their revisions.
registry_state = Table(
    "registry_state",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    # The revision of the last change of keys, shares or tenants.
    Column("access_revision", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("id = 1", name="one_row"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    # The share of the fair scheduler.
    Column("fair_share", Double, nullable=False, server_default="1"),
    # TenantSettings; NULL: the defaults.
    Column("settings", JSON(none_as_null=True)),
)

# Keys of callers. The secret part is stored as a salted hash; a revoked key keeps its row.
api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", String(16), primary_key=True),
    # NULL: the key is not bound to a tenant.
    Column("tenant_id", ForeignKey("tenants.id"), index=True),
    Column("note", String(128), nullable=False),
    Column("salt", String(32), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("scopes", JSON, nullable=False),
    # Patterns of adapters; NULL: all of the tenant.
    Column("adapters", JSON(none_as_null=True)),
    Column("may_use_base", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    # NULL: no limits.
    Column("limits", JSON(none_as_null=True)),
    # The key of which this one is a rotation, and whose use counts on; NULL: its own id.
    Column("bucket", String(16)),
)

# Public keys whose signatures of adapters the tenant accepts.
signing_keys = Table(
    "signing_keys",
    metadata,
    Column("tenant_id", ForeignKey("tenants.id"), primary_key=True),
    Column("key_id", String(16), primary_key=True),
    Column("public_key", String, nullable=False),
    Column("name", String(128), nullable=False),
    Column("created_at", Double, nullable=False),
)

contents = Table(
    "contents",
    metadata,
    Column("cid", String(77), primary_key=True),
    Column("manifest", JSON, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
)

adapters = Table(
    "adapters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("latest", String(64)),
    Column("revision", BigInteger, nullable=False, index=True),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("tenant_id", "name"),
)

# A removed version keeps its row, so that its name cannot get other content.
versions = Table(
    "versions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("adapter_id", ForeignKey("adapters.id"), nullable=False),
    Column("version", String(64), nullable=False),
    Column("cid", ForeignKey("contents.cid"), nullable=False, index=True),
    Column("base_model", String),
    Column("source", String),
    Column("created_at", Double, nullable=False),
    Column("removed_at", Double),
    # Id of the API key of the push, and of the signing key whose signature was verified.
    Column("pushed_by", String(64)),
    Column("signed_by", String(16)),
    Column("signature", String(512)),
    UniqueConstraint("adapter_id", "version"),
)

# The versions that a recipe combines; the recipe is the manifest of its content.
recipe_parts = Table(
    "recipe_parts",
    metadata,
    Column("version_id", ForeignKey("versions.id"), primary_key=True),
    Column("part_id", ForeignKey("versions.id"), primary_key=True, index=True),
)

# All states of all aliases; parent_revision is the target of a rollback.
alias_states = Table(
    "alias_states",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("adapter_id", ForeignKey("adapters.id"), nullable=False),
    Column("alias", String(63), nullable=False),
    Column("revision", Integer, nullable=False),
    Column("parent_revision", Integer),
    Column("action", String(16), nullable=False),
    Column("targets", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("is_current", Boolean, nullable=False),
    UniqueConstraint("adapter_id", "alias", "revision"),
    Index(
        "uq_alias_states_current",
        "adapter_id",
        "alias",
        unique=True,
        sqlite_where=text("is_current"),
        postgresql_where=text("is_current"),
    ),
)

# Adapters that other tenants may use.
shares = Table(
    "shares",
    metadata,
    Column("adapter_id", ForeignKey("adapters.id"), primary_key=True),
    # The tenant that may use it; "*": all.
    Column("tenant", String(128), primary_key=True),
    # "": all versions.
    Column("version", String(64), primary_key=True),
    Column("created_at", Double, nullable=False),
)

statistics = Table(
    "statistics",
    metadata,
    Column("cid", String(77), primary_key=True),
    Column("num_requests", BigInteger, nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("last_used_at", Double, nullable=False, index=True),
)

receipts = Table(
    "receipts",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("tenant", String(128), nullable=False),
    Column("cid", String(77)),
    Column("latency_ms", Double, nullable=False),
    Column("is_cold", Boolean, nullable=False),
    Column("body", JSON, nullable=False),
    Index(None, "created_at"),
    Index(None, "tenant", "created_at"),
    Index(None, "cid", "created_at"),
    Index(None, "latency_ms"),
)

# The adapters of a receipt other than `receipts.cid`, if the request named several.
receipt_parts = Table(
    "receipt_parts",
    metadata,
    Column("receipt_id", String(128), primary_key=True),
    Column("cid", String(77), primary_key=True, index=True),
)

# What receipts say, summed up in the transaction that stores them.
daily_usage = Table(
    "daily_usage",
    metadata,
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("tenant", String(128), primary_key=True),
    Column("api_key_id", String(64), primary_key=True),
    Column("adapter", String(512), primary_key=True),
    Column("num_requests", BigInteger, nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("num_reused_tokens", BigInteger, nullable=False),
    Index(None, "tenant", "day"),
)

# One row: number and digest of the last entry. An append updates it first, and so appends are
# serialized.
audit_head = Table(
    "audit_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

audit_entries = Table(
    "audit_entries",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("created_at", Double, nullable=False),
    Column("actor_tenant", String(128), nullable=False),
    Column("actor_key", String(64), nullable=False),
    Column("address", String(128), nullable=False),
    Column("action", String(32), nullable=False),
    Column("tenant", String(128), nullable=False),
    Column("target", String(512), nullable=False),
    Column("details", JSON, nullable=False),
    Column("result", String(16), nullable=False),
    Column("reason", String(512), nullable=False),
    Column("previous", String(64), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("key_id", String(16), nullable=False),
    Column("signature", String(128), nullable=False),
    Index(None, "tenant", "number"),
)

# One row for each fleet: the number of its last change. A change updates it first, so that changes
# are serialized.
desired_revisions = Table(
    "desired_revisions",
    metadata,
    Column("fleet", String(128), primary_key=True),
    Column("revision", BigInteger, nullable=False),
)

# The adapters that every server of a fleet should have beside those it was started with.
desired_adapters = Table(
    "desired_adapters",
    metadata,
    Column("fleet", String(128), primary_key=True),
    Column("name", String(512), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("source", String, nullable=False),
    Column("cid", String(77), nullable=False),
    Column("previous_source", String, nullable=False),
    Column("previous_cid", String(77), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("changed_at", Double, nullable=False),
)


FOLDER = Path(__file__).parent / "migrations"
# Not alembic's default, so that other programs may use alembic in the same database.
VERSION_TABLE = "loramux_registry_schema"
# alembic keeps the running migration in a global variable.
ALEMBIC_LOCK = threading.Lock()


@functools.cache
def open_scripts() -> ScriptDirectory:
    return ScriptDirectory(str(FOLDER), version_locations=[str(FOLDER)])


def is_current(connection: Connection) -> bool:
    """Return whether the schema is current; raise RegistryUnavailable if it is too new."""
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
    """Run the migrations in the caller's transaction, which must exclude other upgrades."""
    scripts = open_scripts()

    def steps(found: Any, _: MigrationContext) -> Any:
        return scripts._upgrade_revs("head", found)

    with ALEMBIC_LOCK, EnvironmentContext(Config(), scripts, fn=steps) as environment:
        environment.configure(
            connection=connection, target_metadata=metadata, version_table=VERSION_TABLE
        )
        environment.run_migrations()
