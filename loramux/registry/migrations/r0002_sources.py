"""Adds the source of a version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("versions", sa.Column("source", sa.String))


def downgrade() -> None:
    op.drop_column("versions", "source")
