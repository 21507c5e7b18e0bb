"""Adds the adapters that every server of a fleet should have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "desired_revisions",
        sa.Column("fleet", sa.String(128), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("fleet", name="pk_desired_revisions"),
    )
    op.create_table(
        "desired_adapters",
        sa.Column("fleet", sa.String(128), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("cid", sa.String(77), nullable=False),
        sa.Column("previous_source", sa.String, nullable=False),
        sa.Column("previous_cid", sa.String(77), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("fleet", "name", name="pk_desired_adapters"),
    )


def downgrade() -> None:
    op.drop_table("desired_adapters")
    op.drop_table("desired_revisions")
