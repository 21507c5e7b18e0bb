"""Fixtures of the registry for the tests that store receipts in one."""

from __future__ import annotations

from tests.unit.registry.conftest import clock as clock
from tests.unit.registry.conftest import database_url as database_url
from tests.unit.registry.conftest import open_registry as open_registry
from tests.unit.registry.conftest import postgres_database as postgres_database
from tests.unit.registry.conftest import registry as registry
