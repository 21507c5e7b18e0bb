from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Connection

from loramux.errors import AdapterNotFound, RegistryConflict
from loramux.registry.database import Database
from loramux.registry.names import AdapterName, parse_version
from loramux.registry.rows import adapters as adapter_rows
from tests.registry_factory import make_cid, make_content

SQL = AdapterName("alice", "sql")


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    database = Database(database_url)
    with database.writing() as connection:
        yield connection
    database.close()


def add(connection: Connection, version: str, seed: object = 0, adapter: AdapterName = SQL) -> int:
    """Create an adapter and return its id."""
    revision = adapter_rows.begin_change(connection)
    row = adapter_rows.make_adapter(connection, adapter, revision=revision, now=1.0)
    adapter_rows.add_version(connection, row, version, make_content(seed), now=2.0)
    adapter_rows.touch_adapter(connection, row.id, revision=revision)
    return int(row.id)


def test_an_adapter_is_made_once_and_tenants_are_shared(connection: Connection) -> None:
    first, again = add(connection, "1.0.0"), add(connection, "1.1.0")
    other = add(connection, "1.0.0", adapter=AdapterName("alice", "chat"))
    assert first == again != other
    assert adapter_rows.list_adapters(connection, "alice") == [AdapterName("alice", "chat"), SQL]
    assert adapter_rows.list_adapters(connection, "bob") == []


def test_the_same_name_of_two_tenants_is_two_adapters(connection: Connection) -> None:
    add(connection, "1.0.0", seed=1)
    add(connection, "1.0.0", seed=2, adapter=AdapterName("bob", "sql"))
    assert adapter_rows.list_versions(connection, SQL)[0].cid == make_cid(1)
    assert adapter_rows.list_versions(connection, AdapterName("bob", "sql"))[0].cid == make_cid(2)


def test_versions_are_listed_by_number_not_by_text_or_time(connection: Connection) -> None:
    for version in ("1.10.0", "1.9.0", "2.0.0-rc.1"):
        add(connection, version)
    listed = [info.version for info in adapter_rows.list_versions(connection, SQL)]
    assert listed == ["2.0.0-rc.1", "1.10.0", "1.9.0"]
    assert adapter_rows.get_adapter(connection, SQL).latest == "1.10.0"


def test_a_removed_version_is_found_only_as_a_record(connection: Connection) -> None:
    adapter_id = add(connection, "1.0.0")
    row = adapter_rows.get_adapter(connection, SQL)
    found = adapter_rows.get_version(connection, row, SQL, "1.0.0")
    adapter_rows.set_removed(connection, [found.id], 5.0)
    with pytest.raises(AdapterNotFound, match=r"no longer has version 1\.0\.0"):
        adapter_rows.get_version(connection, row, SQL, "1.0.0")
    assert adapter_rows.find_version(connection, adapter_id, "1.0.0") is not None
    assert adapter_rows.named_cids(connection) == set()
    assert adapter_rows.live_versions(connection, adapter_id) == []
    # Its number is not used again.
    assert adapter_rows.next_version(connection, adapter_id) == parse_version("1.0.1")


def test_an_unknown_version_is_not_found(connection: Connection) -> None:
    add(connection, "1.0.0")
    row = adapter_rows.get_adapter(connection, SQL)
    with pytest.raises(AdapterNotFound, match=r"has no version 3\.0\.0; its latest is 1\.0\.0"):
        adapter_rows.get_version(connection, row, SQL, "3.0.0")


def test_other_content_under_an_existing_version_is_refused(connection: Connection) -> None:
    adapter_id = add(connection, "1.0.0", seed=1)
    found = adapter_rows.find_version(connection, adapter_id, "1.0.0")
    assert found is not None
    adapter_rows.refuse_other_content(SQL, found, make_content(1))
    with pytest.raises(RegistryConflict, match=r"alice/sql@1\.0\.0 exists with other content"):
        adapter_rows.refuse_other_content(SQL, found, make_content(2))


def test_changes_since_a_revision_are_listed_oldest_first(connection: Connection) -> None:
    chat = AdapterName("alice", "chat")
    add(connection, "1.0.0")
    add(connection, "1.0.0", adapter=chat)
    assert adapter_rows.changed_since(connection, 0) == (2, [SQL, chat])
    add(connection, "2.0.0")
    assert adapter_rows.changed_since(connection, 0) == (3, [chat, SQL])
    assert adapter_rows.changed_since(connection, 2) == (3, [SQL])
    assert adapter_rows.changed_since(connection, 3) == (3, [])


def test_sources_of_live_versions_are_listed_newest_first(
    connection: Connection,
) -> None:
    adapter_id = add(connection, "1.0.0", seed="same")
    row = adapter_rows.get_adapter(connection, SQL)
    sources = {"1.1.0": "s3://b/old", "1.2.0": "hf:a/b", "1.3.0": "s3://b/old", "1.4.0": "/gone"}
    for at, (version, source) in enumerate(sources.items()):
        content = replace(make_content("same"), source=source)
        adapter_rows.add_version(connection, row, version, content, now=float(at))
    removed = adapter_rows.find_version(connection, adapter_id, "1.4.0")
    assert removed is not None
    adapter_rows.set_removed(connection, [removed.id], 5.0)
    assert adapter_rows.sources_of(connection, make_cid("same")) == ["s3://b/old", "hf:a/b"]
    assert adapter_rows.sources_of(connection, make_cid("other")) == []


def test_one_content_may_have_many_names(connection: Connection) -> None:
    bob = AdapterName("bob", "sql")
    for adapter, version in ((SQL, "1.0.0"), (SQL, "1.1.0"), (bob, "7.0.0")):
        add(connection, version, seed="same", adapter=adapter)
    names = adapter_rows.names_of(connection, make_cid("same"))
    assert names == [(SQL, "1.0.0"), (SQL, "1.1.0"), (bob, "7.0.0")]
    assert adapter_rows.named_cids(connection) == {make_cid("same")}
    manifest = adapter_rows.get_manifest(connection, make_cid("same"))
    assert manifest == make_content("same").manifest
    assert adapter_rows.get_manifest(connection, make_cid("other")) is None
