"""Fixtures that run each test on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loramux.registry.database import Database
from loramux.registry.registry import Registry
from tests.postgres_server import PostgresServer
from tests.registry_factory import FakeClock, wipe, write_empty_registry

KINDS = ["sqlite", "postgresql"]


@pytest.fixture(params=KINDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'registry.db'}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database()


@pytest.fixture(scope="session")
def postgres_database(postgres_server: PostgresServer) -> Iterator[Database]:
    database = Database(postgres_server.new_database())
    yield database
    database.close()


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a database with all tables and no rows."""
    if request.param == "sqlite":
        return f"sqlite:///{write_empty_registry(tmp_path / 'registry.db')}"
    database: Database = request.getfixturevalue("postgres_database")
    wipe(database)
    return database.url.render_as_string(hide_password=False)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def open_registry(database_url: str, clock: FakeClock) -> Iterator[Callable[[], Registry]]:
    """Return a function that opens the same database again, like another process."""
    opened: list[Registry] = []

    def open_one() -> Registry:
        opened.append(Registry(database_url, clock=clock))
        return opened[-1]

    yield open_one
    for registry in opened:
        registry.close()


@pytest.fixture
def registry(open_registry: Callable[[], Registry]) -> Registry:
    return open_registry()
