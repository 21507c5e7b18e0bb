from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text

from loramux.errors import RegistryUnavailable
from loramux.registry import watch
from loramux.registry.database import Database
from loramux.registry.names import AdapterName
from loramux.registry.registry import Registry
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.watch import Watch
from tests.postgres_server import PostgresServer
from tests.registry_factory import make_content

POLL_S = 0.01
TIMEOUT_S = 30.0
SQL, CHAT = AdapterName("a", "sql"), AdapterName("a", "chat")


@pytest.fixture
def feed(registry: Registry) -> Iterator[Watch]:
    with registry.watch(poll_s=POLL_S) as feed:
        yield feed


def collect(feed: Watch, count: int) -> list[AdapterName]:
    names: list[AdapterName] = []
    while len(names) < count:
        changed = feed.next(timeout_s=TIMEOUT_S)
        assert changed is not None, f"only {names} in {TIMEOUT_S} s"
        names += changed
    return names


def test_changes_of_another_process_arrive_in_their_order(
    feed: Watch, open_registry: Callable[[], Registry]
) -> None:
    other = open_registry()
    other.push("a/sql@1.0.0", make_content(1))
    other.push("a/chat@1.0.0", make_content(2))
    assert collect(feed, 2) == [SQL, CHAT]
    other.promote("a/sql", "1.0.0", alias="prod")
    assert collect(feed, 1) == [SQL]
    other.remove("a/chat")
    assert collect(feed, 1) == [CHAT]


def test_only_later_real_changes_are_reported(
    registry: Registry,
) -> None:
    registry.push("a/sql@1.0.0", make_content(1))
    with registry.watch(poll_s=POLL_S) as feed:
        registry.push("a/sql@1.0.0", make_content(1))
        registry.push("a/chat@1.0.0", make_content(2))
        assert collect(feed, 1) == [CHAT]


def test_close_releases_waiting_threads(registry: Registry) -> None:
    feed = registry.watch(poll_s=3600.0)
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.extend(feed))
    reader.start()
    feed.close()
    feed.close()
    reader.join(TIMEOUT_S)
    assert not reader.is_alive() and seen == []
    assert feed.next(timeout_s=TIMEOUT_S) is None
    assert list(feed) == []


@pytest.mark.parametrize("failure", [RegistryUnavailable("away"), ValueError("unforeseen")])
def test_a_watch_outlives_whatever_happens_to_its_database(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    failures = iter([failure, failure])
    look = adapter_rows.changed_since

    def fail_twice(connection: object, revision: int) -> object:
        for error in failures:
            raise error
        return look(connection, revision)  # type: ignore[arg-type]

    monkeypatch.setattr(watch, "RETRY_S", 0.0)
    with registry.watch(poll_s=POLL_S) as feed:
        monkeypatch.setattr(adapter_rows, "changed_since", fail_twice)
        registry.push("a/sql@1.0.0", make_content(1))
        assert collect(feed, 1) == [SQL]


def test_postgresql_wakes_its_watchers_and_a_broken_line_is_mended(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polling is off, so that changes arrive only through LISTEN."""
    monkeypatch.setattr(watch, "LISTEN_POLL_S", 3600.0)
    monkeypatch.setattr(watch, "RETRY_S", 0.0)
    url = postgres_server.new_database()
    database = Database(url)
    with Registry(url) as registry, registry.watch() as feed:
        registry.push("a/sql@1.0.0", make_content(1))
        assert collect(feed, 1) == [SQL]
        with database.writing() as connection:
            listeners = "query LIKE 'LISTEN%' AND datname = current_database()"
            connection.execute(
                text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listeners}")
            )
        registry.push("a/chat@1.0.0", make_content(2))
        assert collect(feed, 1) == [CHAT]
        registry.promote("a/sql", "1.0.0", alias="prod")
        assert collect(feed, 1) == [SQL]
    database.close()


def test_a_feed_without_a_listener_is_reported_not_silent(
    postgres_server: PostgresServer,
) -> None:
    database = Database(postgres_server.new_database())
    stop = watch.StopSignal()
    database.url = database.url.set(database="nowhere")
    with pytest.raises(RegistryUnavailable, match="cannot be listened to"):
        watch.Listener(database, stop)
    stop.close()
    database.close()
