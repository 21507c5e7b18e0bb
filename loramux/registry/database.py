"""One database, SQLite or PostgreSQL, with the transactions that the registry needs."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from loramux.errors import InvalidRequest, RegistryUnavailable
from loramux.registry import schema

BUSY_TIMEOUT_S = 30.0
# SQLite answers "locked" at once, without waiting, to whoever loses the race to switch to WAL.
WAL_ATTEMPTS = 200
WAL_RETRY_S = 0.05
WRITES = "loramux_writes"
SNAPSHOT = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
# Any number that other programs in the same database are unlikely to lock.
MIGRATION_LOCK = 0x6C6F7261

_log = logging.getLogger(__name__)


class Database:
    """Safe to use from any thread. A process that was forked must open its own."""

    def __init__(self, url: str | Path) -> None:
        """A path means a SQLite file, which is created."""
        self.url = parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = self._open_sqlite() if self.is_sqlite else self._open_postgresql()
        self._reader = self._engine.execution_options(**({} if self.is_sqlite else SNAPSHOT))
        self._writer = self._engine.execution_options(**{WRITES: True})
        try:
            self._upgrade()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent state, whatever is written meanwhile."""
        with self._reporting(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """All or nothing. SQLite has one writer at a time."""
        with self._reporting(), self._writer.begin() as connection:
            yield connection

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    def _open_sqlite(self) -> Engine:
        if not self.url.database or self.url.database == ":memory:":
            raise InvalidRequest("The registry needs a file: sqlite:////path/registry.db.")
        Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(self.url, connect_args={"timeout": BUSY_TIMEOUT_S})
        event.listen(engine, "connect", prepare_sqlite)
        event.listen(engine, "begin", begin_sqlite)
        return engine

    def _open_postgresql(self) -> Engine:
        try:
            return create_engine(self.url, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise RegistryUnavailable(
                "A registry in PostgreSQL needs psycopg. Run: pip install 'psycopg[binary]'"
            ) from error

    def _upgrade(self) -> None:
        if self.is_sqlite:
            self._switch_to_wal()
        with self.reading() as connection:
            if schema.is_current(connection):
                return
        with self.writing() as connection:
            if not self.is_sqlite:
                lock = text("SELECT pg_advisory_xact_lock(:key)")
                connection.execute(lock, {"key": MIGRATION_LOCK})
            schema.upgrade(connection)

    def _switch_to_wal(self) -> None:
        with self._reporting():
            for attempt in range(WAL_ATTEMPTS):
                try:
                    set_wal(self._engine)
                    return
                except sqlite3.OperationalError:
                    if attempt == WAL_ATTEMPTS - 1:
                        raise
                    Event().wait(WAL_RETRY_S)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise self._unavailable(error) from error
        except DBAPIError as error:
            if not isinstance(error, OperationalError) and not error.connection_invalidated:
                raise
            raise self._unavailable(error.orig) from error

    def _unavailable(self, error: BaseException | None) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"The registry at {self} cannot be used: {str(error).strip()}. "
            "Check that its database is up and reachable."
        )


def parse_url(url: str | Path) -> URL:
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except ArgumentError:
        # Without its cause, which may quote the URL and its password.
        raise InvalidRequest("The registry's address is not a database URL.") from None
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite":
        return parsed.set(drivername="sqlite")
    raise InvalidRequest(
        f"The registry cannot be kept in {backend}. Give a path, sqlite:///… or postgresql://…."
    )


def set_wal(engine: Engine) -> None:
    connection = engine.raw_connection()
    try:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        mode = cursor.fetchone()
        cursor.close()
    finally:
        connection.close()
    if mode is None or mode[0] != "wal":
        _log.warning("The registry's file system does not allow SQLite's WAL; writers wait longer")


def prepare_sqlite(connection: sqlite3.Connection, _: Any) -> None:
    # Transactions begin where begin_sqlite says, not where the driver guesses.
    connection.isolation_level = None
    for pragma in ("foreign_keys = ON", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")


def begin_sqlite(connection: Connection) -> None:
    # A writer that began as a reader could not wait for its turn: it would fail at once.
    writes = connection.get_execution_options().get(WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def insert_into(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An insert that knows ON CONFLICT, in the words of the connection's database."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)
