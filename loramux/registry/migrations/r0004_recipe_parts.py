"""Adds the parts of versions that are recipes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "recipe_parts",
        sa.Column("version_id", sa.Integer, nullable=False),
        sa.Column("part_id", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("version_id", "part_id", name="pk_recipe_parts"),
        sa.ForeignKeyConstraint(
            ["version_id"], ["versions.id"], name="fk_recipe_parts_version_id_versions"
        ),
        sa.ForeignKeyConstraint(
            ["part_id"], ["versions.id"], name="fk_recipe_parts_part_id_versions"
        ),
    )
    op.create_index("ix_recipe_parts_part_id", "recipe_parts", ["part_id"])


def downgrade() -> None:
    op.drop_table("recipe_parts")
