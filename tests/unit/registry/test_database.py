from __future__ import annotations

import re
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from loramux.errors import InvalidRequest, RegistryUnavailable
from loramux.registry import database as database_module
from loramux.registry.database import Database, insert_into, parse_url
from loramux.registry.schema import registry_state, tenants, versions
from loramux.server.errors import error_info


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgresql://u:p@h/d", "postgresql+psycopg://u:p@h/d"),
        ("postgres://h/d", "postgresql+psycopg://h/d"),
        ("postgresql+asyncpg://h/d", "postgresql+psycopg://h/d"),
        ("sqlite:////data/r.db", "sqlite:////data/r.db"),
        ("/data/r.db", "sqlite:////data/r.db"),
        (Path("/data/r.db"), "sqlite:////data/r.db"),
    ],
)
def test_addresses(given: str | Path, expected: str) -> None:
    assert parse_url(given).render_as_string(hide_password=False) == expected


@pytest.mark.parametrize("given", ["mysql://u:secret@h/d", "://secret", "post gres://secret"])
def test_other_addresses_are_refused_without_quoting_them(given: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_url(given)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_registry_in_memory_would_be_another_one_for_every_connection() -> None:
    with pytest.raises(InvalidRequest, match="needs a file"):
        Database("sqlite://")


def test_an_unreachable_database_is_reported_without_its_password() -> None:
    with pytest.raises(RegistryUnavailable) as caught:
        Database("postgresql://someone:secret@127.0.0.1:1/none?connect_timeout=2")
    assert "secret" not in str(caught.value) and "127.0.0.1" in str(caught.value)
    told = error_info(caught.value).message
    assert not {"127.0.0.1", "someone", "none"} & set(re.split(r"[^\w.]", told)), told


def test_a_locked_database_is_given_up_after_a_time(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.2)
    with closing(Database(database_url)) as database, closing(Database(database_url)) as other:
        with database.writing() as connection:
            connection.execute(insert(tenants).values(name="held", created_at=0))
            with pytest.raises(RegistryUnavailable, match="lock"), other.writing() as waiting:
                waiting.execute(insert(tenants).values(name="held", created_at=0))
        with other.reading() as connection:
            assert connection.scalar(select(func.count()).select_from(tenants)) == 1


def test_a_failed_transaction_leaves_the_old_state(database_url: str) -> None:
    database = Database(database_url)
    with pytest.raises(KeyboardInterrupt), database.writing() as connection:
        connection.execute(insert(tenants).values(name="half", created_at=0))
        raise KeyboardInterrupt
    with database.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(tenants)) == 0
    database.close()


def test_foreign_keys_are_enforced(database_url: str) -> None:
    database = Database(database_url)
    values = {"adapter_id": 77, "version": "1.0.0", "cid": "none", "created_at": 0}
    with pytest.raises(IntegrityError), database.writing() as connection:
        connection.execute(insert(versions).values(**values))
    database.close()


def test_a_reader_sees_one_state_while_another_writes(database_url: str) -> None:
    database, other = Database(database_url), Database(database_url)
    number = select(registry_state.c.revision)
    with database.reading() as reader:
        before = reader.scalar(number)
        with other.writing() as writer:
            writer.execute(update(registry_state).values(revision=99))
        assert reader.scalar(number) == before == 0
    with database.reading() as reader:
        assert reader.scalar(number) == 99
    database.close()
    other.close()


def test_writers_wait_for_each_other_instead_of_failing(database_url: str) -> None:
    """Each writer increments a number; a lost update would show in the sum."""
    database = Database(database_url)

    def count() -> None:
        for _ in range(10):
            with database.writing() as connection:
                connection.execute(
                    update(registry_state).values(revision=registry_state.c.revision + 1)
                )

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.reading() as connection:
        assert connection.scalar(select(registry_state.c.revision)) == 40
    database.close()


def test_insert_knows_conflicts_in_both_dialects(database_url: str) -> None:
    database = Database(database_url)
    with database.writing() as connection:
        for _ in range(2):
            statement = insert_into(connection, tenants).values(name="a", created_at=0)
            connection.execute(statement.on_conflict_do_nothing())
        assert connection.scalar(select(func.count()).select_from(tenants)) == 1
    database.close()


def test_sqlite_survives_power_loss_and_readers_never_block(tmp_path: Path) -> None:
    database = Database(tmp_path / "folder" / "registry.db")
    with database.reading() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(text("PRAGMA synchronous")) == 2
        assert connection.scalar(text("PRAGMA busy_timeout")) == 30_000
    database.close()


def test_a_file_that_is_no_database_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(RegistryUnavailable, match="not a database"):
        Database(path)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(RegistryUnavailable, match="pip install"):
        Database("postgresql://somewhere/registry")
