"""Adds the bucket that rotations of a key share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("bucket", sa.String(16)))


def downgrade() -> None:
    op.drop_column("api_keys", "bucket")
