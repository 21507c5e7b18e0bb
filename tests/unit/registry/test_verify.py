from __future__ import annotations

import re

import pytest
from sqlalchemy import text

from loramux.registry.database import Database
from loramux.registry.registry import Registry
from tests.registry_factory import make_content


def fill(registry: Registry) -> None:
    for version in ("1.0.0", "2.0.0"):
        registry.push(f"a/b@{version}", make_content(version))
        registry.promote("a/b", version, alias="prod")


def test_a_valid_registry_has_no_faults(registry: Registry) -> None:
    assert registry.verify() == ()
    fill(registry)
    registry.rollback("a/b", alias="prod")
    registry.remove("a/b@2.0.0")
    assert registry.verify() == ()


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("UPDATE adapters SET latest = '1.0.0'", r"latest is 1\.0\.0, the highest .* 2\.0\.0"),
        ("UPDATE adapters SET revision = 99", "changed at 99, after the last change, 4"),
        ("UPDATE versions SET removed_at = 1", "prod names 2.0.0, which does not exist"),
        ("DELETE FROM alias_states WHERE revision = 1", "history of the alias prod is broken"),
        ("UPDATE alias_states SET is_current = FALSE", "history of the alias prod is broken"),
    ],
)
def test_each_broken_rule_is_named(
    registry: Registry, database_url: str, damage: str, fault: str
) -> None:
    fill(registry)
    database = Database(database_url)
    with database.writing() as connection:
        connection.execute(text(damage))
    database.close()
    faults = registry.verify()
    assert faults
    assert any(re.search(fault, found) for found in faults)
