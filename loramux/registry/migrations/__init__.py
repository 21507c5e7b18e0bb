"""Alembic's migrations of the registry's schema, in the order of their numbers."""
