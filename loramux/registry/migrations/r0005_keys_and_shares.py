"""Adds keys of callers, adapters shared between tenants, and the fair share of a tenant."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "registry_state",
        sa.Column("access_revision", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.add_column("tenants", sa.Column("fair_share", sa.Double, nullable=False, server_default="1"))
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("tenant_id", sa.Integer),
        sa.Column("note", sa.String(128), nullable=False),
        sa.Column("salt", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("adapters", sa.JSON),
        sa.Column("may_use_base", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id_tenants"
        ),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "shares",
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "tenant", "version", name="pk_shares"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_shares_adapter_id_adapters"
        ),
    )


def downgrade() -> None:
    op.drop_table("shares")
    op.drop_table("api_keys")
    op.drop_column("tenants", "fair_share")
    op.drop_column("registry_state", "access_revision")
