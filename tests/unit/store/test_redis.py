from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from loramux.errors import InvalidRequest
from loramux.store import redis as store_redis
from loramux.store.redis import RedisLimits, RedisTier
from loramux.store.store import ContentStore
from tests.registry_factory import FakeClock
from tests.store_factory import FolderTier, tiny_weights, write_tiny

LIMITS = RedisLimits(max_total_bytes=100, max_object_bytes=60, ttl_s=1000)


@pytest.fixture
def client(redis_url: str) -> Iterator[Redis]:
    client = Redis.from_url(redis_url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tier(client: Redis, clock: FakeClock) -> RedisTier:
    return RedisTier(client, limits=LIMITS, clock=clock)


def put(tier: RedisTier, tmp_path: Path, key: str, content: bytes) -> None:
    (tmp_path / "source").write_bytes(content)
    tier.put(key, tmp_path / "source")


def get(tier: RedisTier, tmp_path: Path, key: str, max_bytes: int = 100) -> bytes | None:
    destination = tmp_path / "destination"
    if not tier.get(key, destination, max_bytes=max_bytes):
        return None
    return destination.read_bytes()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 30, 4096])
def test_a_file_comes_back_whatever_the_size_of_its_pieces(
    tier: RedisTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(store_redis, "CHUNK_BYTES", chunk_bytes)
    content = bytes(range(30))
    put(tier, tmp_path, "blobs/a", content)
    put(tier, tmp_path, "blobs/a", content)
    assert tier.has("blobs/a") and not tier.has("blobs/b")
    assert get(tier, tmp_path, "blobs/a") == content
    assert get(tier, tmp_path, "blobs/b") is None


def test_max_bytes_limits_a_download(tier: RedisTier, tmp_path: Path) -> None:
    put(tier, tmp_path, "blobs/a", b"x" * 30)
    assert get(tier, tmp_path, "blobs/a", max_bytes=29) is None


def test_a_large_file_is_not_cached(tier: RedisTier, tmp_path: Path) -> None:
    put(tier, tmp_path, "blobs/a", b"x" * 61)
    assert not tier.has("blobs/a")


def test_the_least_recently_used_entry_is_evicted(
    tier: RedisTier, tmp_path: Path, clock: FakeClock
) -> None:
    for key in "abc":
        put(tier, tmp_path, f"blobs/{key}", key.encode() * 30)
        clock.advance(1.0)
    get(tier, tmp_path, "blobs/a")
    clock.advance(1.0)
    put(tier, tmp_path, "blobs/d", b"d" * 60)
    assert [key for key in "abcd" if tier.has(f"blobs/{key}")] == ["a", "d"]
    # Evicted entries do not count, or 30 more bytes would not fit.
    put(tier, tmp_path, "blobs/e", b"e" * 10)
    assert tier.has("blobs/a")


def test_expired_entries_do_not_count(
    tier: RedisTier, client: Redis, tmp_path: Path, clock: FakeClock
) -> None:
    put(tier, tmp_path, "blobs/a", b"a" * 60)
    assert 0 < client.ttl("{loramux}:blobs/a") <= LIMITS.ttl_s
    clock.advance(LIMITS.ttl_s + 1)
    put(tier, tmp_path, "blobs/b", b"b" * 30)
    assert client.hgetall("{loramux}:sizes") == {b"{loramux}:blobs/b": b"30"}


def test_an_unfinished_upload_expires_and_is_never_visible(
    tier: RedisTier, client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "eval", die)
    with pytest.raises(KeyboardInterrupt):
        put(tier, tmp_path, "blobs/a", b"a" * 30)
    assert not tier.has("blobs/a")
    leftovers = list(client.scan_iter("*"))
    assert len(leftovers) == 1 and client.ttl(leftovers[0]) > 0


def test_an_eviction_in_the_middle_of_a_read_is_a_miss(
    tier: RedisTier, client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, tmp_path, "blobs/a", b"a" * 30)
    strlen = client.strlen

    def evict(name: str) -> object:
        size = strlen(name)
        client.delete(name)
        return size

    monkeypatch.setattr(client, "strlen", evict)
    assert get(tier, tmp_path, "blobs/a") is None


def test_an_unreachable_redis_acts_like_an_empty_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = RedisTier.from_url("redis://:secret@127.0.0.1:1/0")
    far = FolderTier(tmp_path / "far")
    with caplog.at_level(logging.WARNING):
        cid = ContentStore(tmp_path / "one", tiers=[away, far]).put_folder(
            write_tiny(tmp_path / "a")
        )
        ContentStore(tmp_path / "two", tiers=[away, far]).materialize(cid)
    assert away.num_failures == 1, "an unreachable cache is not asked again"
    assert caplog.text.count("Redis cache failed to look") == 1 and "secret" not in caplog.text
    away.close()


def test_redis_is_retried_later_and_each_outage_is_logged_once(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    client = Redis.from_url("redis://127.0.0.1:1/0")
    tier = RedisTier(client, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not tier.has("blobs/a")
        clock.advance(store_redis.AWAY_S)
        assert get(tier, tmp_path, "blobs/a") is None
    assert (tier.num_failures, len(caplog.records)) == (2, 1)
    client.close()


def test_a_cache_that_comes_back_is_used_again(
    client: Redis, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = RedisTier(client, limits=LIMITS, clock=clock)
    pool = client.connection_pool
    socket = pool.connection_kwargs["path"]
    for path in ("/nowhere", socket):
        pool.connection_kwargs["path"] = path
        pool.reset()
        assert not tier.has("blobs/a")
    clock.advance(store_redis.AWAY_S)
    with caplog.at_level(logging.INFO):
        put(tier, tmp_path, "blobs/a", b"a")
    assert tier.has("blobs/a") and "available again" in caplog.text


@pytest.mark.parametrize(
    "url",
    ["http://u:hunter2@host/0", "redis://:hunter2@host:port/0", "hunter2", "redis://[hunter2"],
)
def test_a_url_that_is_no_redis_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InvalidRequest, match="redis://host:6379/0") as refused:
        RedisTier.from_url(url)
    assert "hunter2" not in str(refused.value) + repr(refused.value.__cause__)


def test_a_second_machine_finds_the_adapter_in_the_cache(client: Redis, tmp_path: Path) -> None:
    tier = RedisTier(client)
    cid = ContentStore(tmp_path / "one", tiers=[tier]).put_folder(
        write_tiny(tmp_path / "a", seed=5)
    )
    second = ContentStore(tmp_path / "two", tiers=[tier])
    view = second.materialize(cid)
    assert (view / "adapter_model.safetensors").read_bytes() == tiny_weights(5)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(InvalidRequest, match="pip install redis"):
        RedisTier.from_url("redis://somewhere")
