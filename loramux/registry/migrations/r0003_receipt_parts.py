"""Adds the further adapters of receipts of sums."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "receipt_parts",
        sa.Column("receipt_id", sa.String(128), nullable=False),
        sa.Column("cid", sa.String(77), nullable=False),
        sa.PrimaryKeyConstraint("receipt_id", "cid", name="pk_receipt_parts"),
    )
    op.create_index("ix_receipt_parts_cid", "receipt_parts", ["cid"])


def downgrade() -> None:
    op.drop_table("receipt_parts")
