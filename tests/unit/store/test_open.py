"""A store as its settings describe it: local first, then the cache, then the bucket."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis

from loramux.config.paths import DataPlaces
from loramux.errors import InvalidRequest, SourceFailed, SourceRefused
from loramux.sources.config import FetchLimits, S3Config, Secret, SourceConfig
from loramux.store.library import open_store
from loramux.store.store import ContentStore
from tests.redis_server import redis_url as redis_url
from tests.s3_server import S3Server
from tests.s3_server import s3_server as s3_server
from tests.store_factory import tiny_weights, write_tiny

AWAY = "redis://127.0.0.1:1/0"


@pytest.fixture
def sources(s3_server: S3Server) -> SourceConfig:
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


def places(folder: Path, cache: str | None, bucket: str | None) -> DataPlaces:
    return DataPlaces(str(folder / "r.db"), folder / "store", cache, bucket)


def hits(store: ContentStore) -> dict[str, int]:
    return {tier.tier: tier.hits for tier in store.tier_stats()}


def test_what_is_missing_comes_from_the_cache_then_from_the_bucket(
    tmp_path: Path, redis_url: str, bucket: str, sources: SourceConfig
) -> None:
    with Redis.from_url(redis_url) as client:
        client.flushall()
        pushing = open_store(places(tmp_path / "a", redis_url, bucket), sources)
        cid = pushing.put_folder(write_tiny(tmp_path / "adapter", 3))
        cached = open_store(places(tmp_path / "b", redis_url, bucket), sources)
        cached.materialize(cid)
        assert hits(cached) == {"shared_cache": 3, "remote_store": 0}
        client.flushall()
        cold = open_store(places(tmp_path / "c", redis_url, bucket), sources)
        view = cold.materialize(cid)
        assert (view / "adapter_model.safetensors").read_bytes() == tiny_weights(3)
        assert hits(cold) == {"shared_cache": 0, "remote_store": 3}
        again = open_store(places(tmp_path / "d", redis_url, None), sources)
        again.materialize(cid)
        assert hits(again) == {"shared_cache": 3}, "what came from afar is cached for the others"


def test_a_cache_that_is_away_fails_nothing_that_the_bucket_has(
    tmp_path: Path, bucket: str, sources: SourceConfig
) -> None:
    pushing = open_store(places(tmp_path / "a", AWAY, bucket), sources)
    cid = pushing.put_folder(write_tiny(tmp_path / "adapter"))
    store = open_store(places(tmp_path / "b", AWAY, bucket), sources)
    store.materialize(cid)
    cache, remote = store.tier_stats()
    assert (cache.hits, cache.failures, remote.hits, remote.failures) == (0, 1, 3, 0)


def test_a_bucket_that_is_away_fails_a_push_but_not_what_is_here(
    tmp_path: Path, bucket: str, sources: SourceConfig
) -> None:
    here = tmp_path / "a"
    cid = open_store(places(here, None, None), sources).put_folder(write_tiny(tmp_path / "x", 1))
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


def test_what_is_no_bucket_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(SourceRefused, match="s3://bucket/folder"):
        open_store(places(tmp_path, None, "https://example.com/x"), SourceConfig())
    assert not (tmp_path / "store").exists()
