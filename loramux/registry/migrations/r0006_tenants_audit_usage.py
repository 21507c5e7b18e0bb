"""Adds limits of tenants, signing keys, the audit log and the usage by day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("settings", sa.JSON))
    op.add_column("api_keys", sa.Column("limits", sa.JSON))
    for name, length in (("pushed_by", 64), ("signed_by", 16), ("signature", 512)):
        op.add_column("versions", sa.Column(name, sa.String(length)))
    create_signing_keys()
    create_audit()
    create_usage()


def downgrade() -> None:
    for table in ("daily_usage", "audit_entries", "audit_head", "signing_keys"):
        op.drop_table(table)
    for name in ("signature", "signed_by", "pushed_by"):
        op.drop_column("versions", name)
    op.drop_column("api_keys", "limits")
    op.drop_column("tenants", "settings")


def create_signing_keys() -> None:
    op.create_table(
        "signing_keys",
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("public_key", sa.String, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_id", name="pk_signing_keys"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_signing_keys_tenant_id"),
    )


def create_audit() -> None:
    head = op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_head"),
        sa.CheckConstraint("id = 1", name=op.f("ck_audit_head_one_row")),
    )
    op.bulk_insert(head, [{"id": 1, "number": 0, "digest": ""}])
    op.create_table(
        "audit_entries",
        sa.Column("number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("actor_tenant", sa.String(128), nullable=False),
        sa.Column("actor_key", sa.String(64), nullable=False),
        sa.Column("address", sa.String(128), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("target", sa.String(512), nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("result", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(512), nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("signature", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_audit_entries"),
    )
    op.create_index("ix_audit_entries_tenant_number", "audit_entries", ["tenant", "number"])


def create_usage() -> None:
    op.create_table(
        "daily_usage",
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("api_key_id", sa.String(64), nullable=False),
        sa.Column("adapter", sa.String(512), nullable=False),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_reused_tokens", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("day", "tenant", "api_key_id", "adapter", name="pk_daily_usage"),
    )
    op.create_index("ix_daily_usage_tenant_day", "daily_usage", ["tenant", "day"])
