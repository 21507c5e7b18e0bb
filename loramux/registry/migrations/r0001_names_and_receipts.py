"""Creates tenants, adapters, versions, aliases, statistics and receipts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_names()
    create_aliases()
    create_records()


def downgrade() -> None:
    for table in (
        *("receipts", "statistics", "alias_states", "versions"),
        *("adapters", "contents", "tenants", "registry_state"),
    ):
        op.drop_table(table)


def create_names() -> None:
    state = op.create_table(
        "registry_state",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_registry_state"),
        sa.CheckConstraint("id = 1", name=op.f("ck_registry_state_one_row")),
    )
    op.bulk_insert(state, [{"id": 1, "revision": 0}])
    op.create_table(
        "tenants",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "contents",
        sa.Column("cid", sa.String(77), nullable=False),
        sa.Column("manifest", sa.JSON, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("cid", name="pk_contents"),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("latest", sa.String(64)),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
    )
    op.create_index("ix_adapters_revision", "adapters", ["revision"])
    create_versions()


def create_versions() -> None:
    op.create_table(
        "versions",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("cid", sa.String(77), nullable=False),
        sa.Column("base_model", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("removed_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_versions"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_versions_adapter_id"),
        sa.ForeignKeyConstraint(["cid"], ["contents.cid"], name="fk_versions_cid"),
        sa.UniqueConstraint("adapter_id", "version", name="uq_versions_adapter_id_version"),
    )
    op.create_index("ix_versions_cid", "versions", ["cid"])


def create_aliases() -> None:
    op.create_table(
        "alias_states",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("parent_revision", sa.Integer),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("targets", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("is_current", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_alias_states"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_alias_states_adapter_id"),
        sa.UniqueConstraint(
            "adapter_id", "alias", "revision", name="uq_alias_states_adapter_id_alias_revision"
        ),
    )
    op.create_index(
        "uq_alias_states_current",
        "alias_states",
        ["adapter_id", "alias"],
        unique=True,
        sqlite_where=sa.text("is_current"),
        postgresql_where=sa.text("is_current"),
    )


def create_records() -> None:
    op.create_table(
        "statistics",
        sa.Column("cid", sa.String(77), nullable=False),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("cid", name="pk_statistics"),
    )
    op.create_index("ix_statistics_last_used_at", "statistics", ["last_used_at"])
    op.create_table(
        "receipts",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("cid", sa.String(77)),
        sa.Column("latency_ms", sa.Double, nullable=False),
        sa.Column("is_cold", sa.Boolean, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_receipts"),
    )
    for columns in (["created_at"], ["tenant", "created_at"], ["cid", "created_at"]):
        op.create_index(f"ix_receipts_{'_'.join(columns)}", "receipts", columns)
    op.create_index("ix_receipts_latency_ms", "receipts", ["latency_ms"])
