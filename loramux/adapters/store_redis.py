"""A shared cache in Redis: bounded in bytes and time, and never needed."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.errors import InvalidRequest

if TYPE_CHECKING:
    from redis import Redis

CHUNK_BYTES = 4 * 2**20
# An upload that its writer did not finish is gone after this.
UPLOAD_TTL_S = 600
TIMEOUT_S = 5.0

# KEYS: upload, key, sizes, used. ARGV: size, ttl_s, max_total_bytes, now.
# Forgets what has expired, then what was not used for longest, until the sizes fit.
COMMIT = """
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('HSET', KEYS[3], KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[4], ARGV[4], KEYS[2])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[4] - ARGV[2])) do
    redis.call('DEL', old)
    redis.call('HDEL', KEYS[3], old)
    redis.call('ZREM', KEYS[4], old)
end
local total = 0
for _, size in ipairs(redis.call('HVALS', KEYS[3])) do total = total + size end
while total > tonumber(ARGV[3]) do
    local oldest = redis.call('ZRANGE', KEYS[4], 0, 0)[1]
    if not oldest then break end
    total = total - (redis.call('HGET', KEYS[3], oldest) or 0)
    redis.call('DEL', oldest)
    redis.call('HDEL', KEYS[3], oldest)
    redis.call('ZREM', KEYS[4], oldest)
end
return total
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLimits:
    max_total_bytes: int = 4 * 2**30
    max_object_bytes: int = 512 * 2**20
    """Larger files are not cached; a value in Redis cannot be larger than this default."""
    ttl_s: int = 24 * 3600
    """Since the last use."""


DEFAULT_LIMITS = RedisLimits()


class RedisTier:
    """A RemoteTier. While Redis is away it has nothing and keeps nothing: serving goes on."""

    def __init__(
        self,
        client: Redis,
        *,
        prefix: str = "loramux",
        limits: RedisLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        from redis.exceptions import RedisError

        self._client = client
        # One hash slot for all, as the script needs on a cluster.
        self._prefix = f"{{{prefix}}}"
        self._limits = limits
        self._clock = clock
        self._errors = RedisError
        self.num_failures = 0

    @classmethod
    def from_url(cls, url: str, *, limits: RedisLimits = DEFAULT_LIMITS) -> RedisTier:
        try:
            from redis import Redis
        except ModuleNotFoundError as error:
            raise InvalidRequest(
                "A cache in Redis needs its client. Run: pip install redis"
            ) from error
        client = Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        return cls(client, limits=limits)

    def has(self, key: str) -> bool:
        try:
            return bool(self._client.exists(self._name(key)))
        except self._errors as error:
            self._note_failure("has", error)
            return False

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        try:
            return self._download(self._name(key), destination, max_bytes=max_bytes)
        except self._errors as error:
            self._note_failure("get", error)
            return False

    def put(self, key: str, source: Path) -> None:
        size = source.stat().st_size
        if size > min(self._limits.max_object_bytes, self._limits.max_total_bytes):
            return
        try:
            self._upload(self._name(key), source, size)
        except self._errors as error:
            self._note_failure("put", error)

    def close(self) -> None:
        self._client.close()

    def _download(self, name: str, destination: Path, *, max_bytes: int) -> bool:
        size = self._client.strlen(name)
        if not 0 < size <= max_bytes:
            return False
        with destination.open("wb") as writer:
            while writer.tell() < size:
                start = writer.tell()
                chunk = self._client.getrange(name, start, start + CHUNK_BYTES - 1)
                if not chunk:
                    # Evicted meanwhile.
                    return False
                assert isinstance(chunk, bytes), "the client must not decode what it gets"
                writer.write(chunk)
        self._client.expire(name, self._limits.ttl_s)
        self._client.zadd(self._used, {name: self._clock()}, xx=True)
        return True

    def _upload(self, name: str, source: Path, size: int) -> None:
        upload = f"{self._prefix}:upload:{secrets.token_hex(8)}"
        with source.open("rb") as reader:
            while chunk := reader.read(CHUNK_BYTES):
                self._client.append(upload, chunk)
                self._client.expire(upload, UPLOAD_TTL_S)
        keys = [upload, name, f"{self._prefix}:sizes", self._used]
        limits = [self._limits.ttl_s, self._limits.max_total_bytes]
        self._client.eval(COMMIT, len(keys), *keys, size, *limits, self._clock())

    @property
    def _used(self) -> str:
        return f"{self._prefix}:used"

    def _name(self, key: str) -> str:
        return f"{self._prefix}:{key}"

    def _note_failure(self, action: str, error: Exception) -> None:
        self.num_failures += 1
        _log.warning("The Redis cache failed to %s: %s", action, error)
