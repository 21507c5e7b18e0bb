"""A feed of changed adapters, by LISTEN/NOTIFY on PostgreSQL and by polling on SQLite."""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from loramux.errors import LoramuxError, RegistryUnavailable
from loramux.registry.database import CLIENT_MESSAGE, Database
from loramux.registry.names import AdapterName
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows.access import CHANNEL, access_revision

DEFAULT_POLL_S = 0.5
# PostgreSQL is also polled at this interval, because a proxy may drop notifications.
LISTEN_POLL_S = 15.0
RETRY_S = 1.0
# The TCP keepalive time after which a lost server is detected.
KEEPALIVE_S = 10

_log = logging.getLogger(__name__)


class Waiter(Protocol):
    """Blocks until adapters may have changed, or until the stop signal."""

    def wait(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Change:
    revision: int
    names: tuple[AdapterName, ...]


class Watch:
    """Iterates over tuples of changed names, the oldest first; close() ends the iteration."""

    def __init__(
        self,
        database: Database,
        *,
        poll_s: float = DEFAULT_POLL_S,
        on_access: Callable[[], None] | None = None,
    ) -> None:
        """on_access: called on the watch's thread after keys, shares or tenants have changed."""
        self._database = database
        self._on_access = on_access
        self._poll_s = poll_s
        self._stop = StopSignal()
        # Read here, so that changes before the thread's first query are not missed.
        with database.reading() as connection:
            self._revision, _ = adapter_rows.changed_since(connection, 0)
            self._access_revision = access_revision(connection)
        self.handled = self._revision
        """The revision up to which the iterating thread has handled all changes."""
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="registry-watch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[AdapterName, ...]]:
        while (change := self._changes.get()) is not None:
            if change.names:
                yield change.names
            self.handled = change.revision
        # Wakes the next iterating thread.
        self._changes.put(None)

    def next(self, *, timeout_s: float) -> tuple[AdapterName, ...] | None:
        """Return the next changed names, or None after a timeout or close()."""
        try:
            while (change := self._changes.get(timeout=timeout_s)) is not None:
                if change.names:
                    return change.names
        except queue.Empty:
            return None
        self._changes.put(None)
        return None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._stop.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._follow()
                except LoramuxError as error:
                    _log.warning("The registry's watch starts again: %s", error)
                    self._stop.wait(RETRY_S)
                # Without a watch, the server would keep old versions unnoticed.
                except Exception:
                    _log.exception("The registry's watch failed and starts again")
                    self._stop.wait(RETRY_S)
        finally:
            self._changes.put(None)

    def _follow(self) -> None:
        waiter = self._open_waiter()
        try:
            while not self._stop.is_set():
                self._look()
                waiter.wait()
        finally:
            waiter.close()

    def _look(self) -> None:
        with self._database.reading() as connection:
            revision, names = adapter_rows.changed_since(connection, self._revision)
            access = access_revision(connection)
        if access != self._access_revision:
            if self._on_access is not None:
                self._on_access()
            # Set after the call: one that fails is repeated.
            self._access_revision = access
        if revision != self._revision:
            self._changes.put(_Change(revision, tuple(names)))
        self._revision = revision

    def _open_waiter(self) -> Waiter:
        if self._database.is_sqlite:
            return Pause(self._stop, self._poll_s)
        return Listener(self._database, self._stop)


class StopSignal:
    """An event that can be waited for together with a socket."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._event = threading.Event()
        self._is_closed = False

    def set(self) -> None:
        if not self._event.is_set():
            self._event.set()
            os.write(self._writer, b"x")

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float, *descriptors: int) -> None:
        """Blocks until the event is set, a descriptor is readable, or the timeout."""
        poll = select.poll()
        for descriptor in (self._reader, *descriptors):
            poll.register(descriptor, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self._reader)
            os.close(self._writer)


class Pause:
    def __init__(self, stop: StopSignal, poll_s: float) -> None:
        self._stop = stop
        self._poll_s = poll_s

    def wait(self) -> None:
        self._stop.wait(self._poll_s)

    def close(self) -> None:
        pass


class Listener:
    """Waits for notifications of PostgreSQL on its own connection."""

    def __init__(self, database: Database, stop: StopSignal) -> None:
        import psycopg

        self._stop = stop
        self._lost = psycopg.OperationalError
        url = database.url.set(drivername="postgresql")
        try:
            self._connection = psycopg.connect(
                url.render_as_string(hide_password=False),
                autocommit=True,
                keepalives_idle=KEEPALIVE_S,
            )
            self._connection.execute(f"LISTEN {CHANNEL}")
        except psycopg.OperationalError as error:
            raise RegistryUnavailable(
                f"{database} cannot be listened to: {error}.", client_message=CLIENT_MESSAGE
            ) from error

    def wait(self) -> None:
        self._stop.wait(LISTEN_POLL_S, self._connection.fileno())
        try:
            for _ in self._connection.notifies(timeout=0):
                pass
        except self._lost as error:
            raise RegistryUnavailable(
                f"The connection was lost: {error}.", client_message=CLIENT_MESSAGE
            ) from error

    def close(self) -> None:
        self._connection.close()
