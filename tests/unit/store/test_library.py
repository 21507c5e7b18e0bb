"""Adapters by name, and a store with its tiers: local first, then the cache, then the bucket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis

from loramux.config.paths import DataPaths
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    InvalidRequest,
    LoramuxError,
    RegistryConflict,
    SourceFailed,
    SourceNotFound,
    SourceRefused,
)
from loramux.registry.records import Use
from loramux.registry.registry import Registry
from loramux.sources.config import FetchLimits, S3Config, Secret, SourceConfig
from loramux.store.library import AdapterLibrary, open_store
from loramux.store.store import ContentStore
from tests.registry_factory import FakeClock
from tests.s3_server import S3Server
from tests.store_factory import FolderTier, all_files, damage, tiny_weights, write_tiny

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def library(tmp_path: Path, clock: FakeClock) -> Iterator[AdapterLibrary]:
    store = ContentStore(tmp_path / "store", clock=clock)
    with Registry(tmp_path / "registry.db", clock=clock) as registry:
        yield AdapterLibrary(store, registry, clock=clock)


def push(library: AdapterLibrary, tmp_path: Path, reference: str, seed: int) -> str:
    return library.push(write_tiny(tmp_path / "sources" / str(seed), seed), reference).cid


def test_from_push_to_pull(library: AdapterLibrary, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", seed=1)
    pushed = library.push(folder, "alice/sql@1.4.2")
    assert (str(pushed.version), pushed.is_new) == ("1.4.2", True)
    assert library.registry.show("alice/sql").versions[0].base_model == "tiny-llama"
    assert library.registry.manifest(pushed.cid) == library.store.read(pushed.cid).manifest
    resolved = library.pull("alice/sql@1.4.2", tmp_path / "out")
    assert resolved.cid == pushed.cid
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == tiny_weights(1)
    resolved, view = library.open("alice/sql")
    assert (resolved.alias, (view / WEIGHTS).read_bytes()) == ("latest", tiny_weights(1))


def test_a_second_push_needs_the_same_content(library: AdapterLibrary, tmp_path: Path) -> None:
    push(library, tmp_path, "alice/sql@1.0.0", 1)
    again = library.push(write_tiny(tmp_path / "b", seed=1), "alice/sql@1.0.0")
    assert not again.is_new
    with pytest.raises(RegistryConflict, match="other content"):
        push(library, tmp_path, "alice/sql@1.0.0", 2)
    assert library.registry.cids() == {again.cid}
    assert library.verify().faults == ()


def test_without_a_version_each_push_gets_the_next(library: AdapterLibrary, tmp_path: Path) -> None:
    versions = [library.push(write_tiny(tmp_path / "a", s), "sql").version for s in (1, 1, 2)]
    assert versions == ["1.0.0", "1.0.0", "1.0.1"]


def test_tenants_with_equal_content_share_files(library: AdapterLibrary, tmp_path: Path) -> None:
    push(library, tmp_path, "alice/sql@1.0.0", 1)
    size = library.store.size_bytes()
    push(library, tmp_path, "bob/other@7.0.0", 1)
    assert library.store.size_bytes() == size
    library.registry.remove("alice/sql")
    library.gc(grace_s=0.0)
    assert library.open("bob/other")[1].exists()


@pytest.mark.parametrize("reference", ["../x@1.0.0", "a/b@prod", "a b@1.0.0", "a/b@1.0"])
def test_an_invalid_name_writes_no_files(
    library: AdapterLibrary, tmp_path: Path, reference: str
) -> None:
    with pytest.raises(InvalidRequest):
        push(library, tmp_path, reference, 1)
    assert all_files(tmp_path / "store") == {"lock"}


def test_gc_keeps_named_used_and_new_adapters(
    library: AdapterLibrary, tmp_path: Path, clock: FakeClock
) -> None:
    cids = [push(library, tmp_path, f"a/b@{n}.0.0", n) for n in range(4)]
    for number in (1, 2, 3):
        library.registry.remove(f"a/b@{number}.0.0")
    clock.advance(5000.0)
    # Adapter 2 may still be in use; 3 was put again without a name.
    library.registry.add_uses([Use(cid=cids[2], at=clock.now - 10.0)])
    library.store.put_folder(tmp_path / "sources" / "3")
    assert library.gc(grace_s=3600.0).num_adapters == 1
    assert set(library.store.cids()) == {cids[0], cids[2], cids[3]}
    assert library.gc(grace_s=0.0).num_adapters == 2
    assert library.store.cids() == [cids[0]]


def test_gc_never_removes_an_adapter_of_a_concurrent_push(
    library: AdapterLibrary, tmp_path: Path
) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def collect() -> None:
        try:
            while not stop.is_set():
                library.gc(grace_s=0.0)
        except BaseException as error:
            failures.append(error)

    collector = threading.Thread(target=collect)
    collector.start()
    for number in range(15):
        cid = push(library, tmp_path, f"a/b@{number}.0.0", number)
        assert (library.store.materialize(cid) / WEIGHTS).exists()
    stop.set()
    collector.join()
    assert failures == []
    assert library.verify().faults == ()


def test_a_name_without_files_is_reported(library: AdapterLibrary, tmp_path: Path) -> None:
    cid = push(library, tmp_path, "alice/sql@1.0.0", 1)
    library.store.gc(set)
    assert library.verify().faults == (
        f"alice/sql@1.0.0 needs {cid}, which neither the store nor its tiers have.",
    )
    with pytest.raises(AdapterNotFound):
        library.pull("alice/sql", tmp_path / "out")


def test_a_machine_that_shares_only_registry_and_bucket_serves_the_push(
    library: AdapterLibrary, tmp_path: Path
) -> None:
    """The files are in the remote tier before the name is visible to others."""
    tier = FolderTier(tmp_path / "bucket")
    here = AdapterLibrary(ContentStore(tmp_path / "here", tiers=[tier]), library.registry)
    there = AdapterLibrary(ContentStore(tmp_path / "there", tiers=[tier]), library.registry)
    push(here, tmp_path, "alice/sql@1.0.0", 3)
    assert there.verify().faults == ()
    assert (there.open("alice/sql")[1] / WEIGHTS).read_bytes() == tiny_weights(3)


def test_the_library_comes_without_a_database_driver() -> None:
    """Machines of the engine have neither SQLAlchemy nor Redis."""
    import subprocess
    import sys

    code = """
import sys
for name in ("sqlalchemy", "alembic", "psycopg", "redis", "torch"):
    sys.modules[name] = None
import loramux.store.library, loramux.store.redis
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Sources:
    """Sources by name that count their opening and fail on demand."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.failures: dict[str, LoramuxError] = {}
        self.opened: list[str] = []

    @contextmanager
    def open(self, source: str) -> Iterator[Path]:
        self.opened.append(source)
        if source in self.failures:
            raise self.failures[source]
        yield self.folders[source]


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    found = Sources()
    found.folders["s3://b/a"] = write_tiny(tmp_path / "a", seed=1)
    return found


@pytest.fixture
def fetching(library: AdapterLibrary, sources: Sources) -> AdapterLibrary:
    return AdapterLibrary(library.store, library.registry, open_source=sources.open)


def lose(library: AdapterLibrary) -> None:
    for path in all_files(library.store.root):
        if path.startswith(("records", "blobs", "views")):
            (library.store.root / path).unlink()


def test_a_lost_adapter_is_fetched_from_its_source_once(
    fetching: AdapterLibrary, sources: Sources, tmp_path: Path
) -> None:
    cid = fetching.push(tmp_path / "a", "alice/sql@1.0.0", source="s3://b/a").cid
    fetching.materialize(cid)
    assert sources.opened == []
    lose(fetching)
    assert (fetching.materialize(cid) / WEIGHTS).read_bytes() == tiny_weights(1)
    assert (fetching.materialize(cid) / WEIGHTS).exists() and sources.opened == ["s3://b/a"]
    for blob in (fetching.store.root / "blobs").rglob("*"):
        if blob.is_file():
            damage(blob)
    assert fetching.pull("alice/sql", tmp_path / "out").cid == cid
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == tiny_weights(1)


def test_a_source_with_other_content_is_refused_with_both_cids(
    fetching: AdapterLibrary, sources: Sources, tmp_path: Path
) -> None:
    cid = fetching.push(tmp_path / "a", "alice/sql@1.0.0", source="s3://b/a").cid
    lose(fetching)
    other = ContentStore(tmp_path / "other").put_folder(write_tiny(tmp_path / "a", seed=2))
    with pytest.raises(AdapterRefused, match="source_changed|other content") as refused:
        fetching.materialize(cid)
    assert refused.value.code == "source_changed"
    assert all(text in str(refused.value) for text in (cid, other, "s3://b/a"))
    assert fetching.store.cids() == []


def test_the_next_source_is_tried_and_a_temporary_failure_is_reported(
    fetching: AdapterLibrary, sources: Sources, tmp_path: Path
) -> None:
    cid = fetching.push(tmp_path / "a", "alice/sql@1.0.0", source="s3://b/a").cid
    fetching.push(tmp_path / "a", "bob/sql@1.0.0", source="hf:bob/sql")
    lose(fetching)
    sources.failures["hf:bob/sql"] = SourceFailed("The hub is away.")
    fetching.materialize(cid)
    assert sources.opened == ["hf:bob/sql", "s3://b/a"]
    lose(fetching)
    sources.failures["s3://b/a"] = SourceNotFound("The bucket is gone.")
    with pytest.raises(SourceFailed, match="hub is away"):
        fetching.materialize(cid)
    sources.failures["hf:bob/sql"] = SourceNotFound("No such repository.")
    with pytest.raises(AdapterNotFound, match="No such repository.*The bucket is gone"):
        fetching.materialize(cid)


def test_an_adapter_without_a_source_stays_missing(
    fetching: AdapterLibrary, library: AdapterLibrary, tmp_path: Path
) -> None:
    cid = library.push(tmp_path / "a", "alice/sql@1.0.0").cid
    lose(library)
    for each in (fetching, library):
        with pytest.raises(AdapterNotFound, match=f"{cid} is in the store"):
            each.materialize(cid)


AWAY = "redis://127.0.0.1:1/0"


@pytest.fixture
def bucket_settings(s3_server: S3Server) -> SourceConfig:
    return SourceConfig(
        s3=S3Config(
            endpoint=s3_server.endpoint,
            access_key_id=Secret(s3_server.access_key_id),
            secret_access_key=Secret(s3_server.secret_access_key),
        ),
        limits=FetchLimits(max_attempts=1),
    )


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return f"s3://{s3_server.bucket}/{uuid4().hex}"


def places(folder: Path, cache: str | None, bucket: str | None) -> DataPaths:
    return DataPaths(str(folder / "r.db"), folder / "store", cache, bucket)


def hits(store: ContentStore) -> dict[str, int]:
    return {tier.tier: tier.hits for tier in store.tier_stats()}


def test_a_missing_adapter_comes_from_the_cache_then_from_the_bucket(
    tmp_path: Path, redis_url: str, bucket: str, bucket_settings: SourceConfig
) -> None:
    with Redis.from_url(redis_url) as client:
        client.flushall()
        pushing = open_store(places(tmp_path / "a", redis_url, bucket), bucket_settings)
        cid = pushing.put_folder(write_tiny(tmp_path / "adapter", 3))
        cached = open_store(places(tmp_path / "b", redis_url, bucket), bucket_settings)
        cached.materialize(cid)
        assert hits(cached) == {"shared_cache": 3, "remote_store": 0}
        client.flushall()
        cold = open_store(places(tmp_path / "c", redis_url, bucket), bucket_settings)
        view = cold.materialize(cid)
        assert (view / "adapter_model.safetensors").read_bytes() == tiny_weights(3)
        assert hits(cold) == {"shared_cache": 0, "remote_store": 3}
        again = open_store(places(tmp_path / "d", redis_url, None), bucket_settings)
        again.materialize(cid)
        assert hits(again) == {"shared_cache": 3}, "what came from afar is cached for the others"


def test_an_unreachable_cache_does_not_hide_the_bucket(
    tmp_path: Path, bucket: str, bucket_settings: SourceConfig
) -> None:
    pushing = open_store(places(tmp_path / "a", AWAY, bucket), bucket_settings)
    cid = pushing.put_folder(write_tiny(tmp_path / "adapter"))
    store = open_store(places(tmp_path / "b", AWAY, bucket), bucket_settings)
    store.materialize(cid)
    cache, remote = store.tier_stats()
    assert (cache.hits, cache.failures, remote.hits, remote.failures) == (0, 1, 3, 0)


def test_an_unreachable_bucket_fails_a_push_but_not_local_reads(
    tmp_path: Path, bucket: str, bucket_settings: SourceConfig
) -> None:
    here = tmp_path / "a"
    cid = open_store(places(here, None, None), bucket_settings).put_folder(
        write_tiny(tmp_path / "x", 1)
    )
    nowhere = SourceConfig(
        s3=S3Config(
            endpoint="http://127.0.0.1:9",
            access_key_id=Secret("key-id"),
            secret_access_key=Secret("hunter2"),
        ),
        limits=FetchLimits(max_attempts=1),
    )
    store = open_store(places(here, None, bucket), nowhere)
    assert store.materialize(cid).is_dir()
    with pytest.raises(SourceFailed, match="could not be reached") as failed:
        store.put_folder(write_tiny(tmp_path / "y", 2))
    assert "hunter2" not in str(failed.value)
    assert store.cids() == [cid], "a push that the bucket missed seems to be kept"
    assert store.tier_stats()[0].failures == 1


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/x", "s3://bucket/x?key=hunter2"])
def test_credentials_in_the_url_are_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="AWS_SECRET_ACCESS_KEY") as refused:
        open_store(places(tmp_path, None, url), SourceConfig())
    assert "hunter2" not in str(refused.value)


def test_an_invalid_bucket_url_is_refused_before_the_store_opens(tmp_path: Path) -> None:
    with pytest.raises(SourceRefused, match="s3://bucket/folder"):
        open_store(places(tmp_path, None, "https://example.com/x"), SourceConfig())
    assert not (tmp_path / "store").exists()
