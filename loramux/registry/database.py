"""The registry's database, SQLite or PostgreSQL, and its transactions."""

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

from loramux.base.private_files import explaining, make_private_folder, private_opener
from loramux.errors import InvalidRequest, RegistryUnavailable
from loramux.registry import schema

BUSY_TIMEOUT_S = 30.0
# SQLite fails with "locked" without waiting when two processes switch to WAL at once.
WAL_ATTEMPTS = 200
WAL_RETRY_S = 0.05
WRITES = "loramux_writes"
SNAPSHOT = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
# An arbitrary key that other programs in the same database are unlikely to lock.
MIGRATION_LOCK = 0x6C6F7261
CLIENT_MESSAGE = "The registry cannot be used now; the server's log has the reason."
"""Replaces messages that name the database, so that clients do not learn its address."""

_log = logging.getLogger(__name__)


class Database:
    """A database for all threads of a process; a forked process must open its own."""

    def __init__(self, url: str | Path) -> None:
        """Open the database; a path means a SQLite file, which is created."""
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
        """Begins a read transaction, which sees one consistent snapshot."""
        with self._reporting(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Begins a write transaction; SQLite allows one at a time."""
        with self._reporting(), self._writer.begin() as connection:
            yield connection

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    def _open_sqlite(self) -> Engine:
        if not self.url.database or self.url.database == ":memory:":
            raise InvalidRequest("The registry needs a file: sqlite:////path/registry.db.")
        path = Path(self.url.database)
        with explaining(path, "LORAMUX_DATA or --registry"):
            make_private_folder(path.parent)
            # SQLite gives its other files the mode of this one.
            if not path.exists():
                open(path, "ab", opener=private_opener).close()
        engine = create_engine(self.url, connect_args={"timeout": BUSY_TIMEOUT_S})
        event.listen(engine, "connect", prepare_sqlite)
        event.listen(engine, "begin", begin_sqlite)
        return engine

    def _open_postgresql(self) -> Engine:
        try:
            engine = create_engine(self.url, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise RegistryUnavailable(
                "A registry in PostgreSQL needs psycopg. Run: pip install 'psycopg[binary]'"
            ) from error
        event.listen(engine, "connect", prepare_postgresql)
        return engine

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
            "Check that its database is up and reachable.",
            client_message=CLIENT_MESSAGE,
        )


def parse_url(url: str | Path) -> URL:
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except ArgumentError:
        # Raised without its cause, which may quote the URL with its password.
        raise InvalidRequest("The registry's address is not a database URL.") from None
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite":
        return parsed.set(drivername="sqlite")
    raise InvalidRequest(
        f"The registry does not support {backend}. Give a path, sqlite:///… or postgresql://…."
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
    # begin_sqlite starts transactions, not the driver.
    connection.isolation_level = None
    for pragma in ("foreign_keys = ON", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")


def prepare_postgresql(connection: Any, _: Any) -> None:
    # As with SQLite: no thread waits for ever for a table that another program has locked.
    connection.execute(f"SET lock_timeout = '{BUSY_TIMEOUT_S}s'")
    connection.commit()


def begin_sqlite(connection: Connection) -> None:
    # A transaction that starts as a reader cannot wait for the write lock; it would fail.
    writes = connection.get_execution_options().get(WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def insert_into(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT with ON CONFLICT support in the dialect of the connection."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)
