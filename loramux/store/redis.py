"""The remote tier that caches adapters in Redis, bounded in bytes and age."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from loramux.base.progress import SILENT, ByteSink
from loramux.errors import InvalidRequest
from loramux.sources.config import Secret, scrub

if TYPE_CHECKING:
    from redis import Redis

CHUNK_BYTES = 4 * 2**20
# An unfinished upload expires after this time.
UPLOAD_TTL_S = 600
TIMEOUT_S = 5.0
# After a failure, Redis is not asked again for this long.
AWAY_S = 15.0

# KEYS: upload, key, sizes, used. ARGV: size, ttl_s, max_total_bytes, now.
# Removes expired entries, then the least recently used ones, until the total size fits.
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
    """Larger files are not cached; the default is the largest value that Redis can store."""
    ttl_s: int = 24 * 3600
    """The time to live since the last use."""


DEFAULT_LIMITS = RedisLimits()


class RedisTier:
    """A RemoteTier in Redis; while Redis cannot be reached, it acts like an empty cache."""

    def __init__(  # noqa: PLR0913
        self,
        client: Redis,
        *,
        prefix: str = "loramux",
        limits: RedisLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.time,
        sink: ByteSink = SILENT,
        secrets: tuple[Secret, ...] = (),
    ) -> None:
        from redis.exceptions import RedisError

        self._client = client
        # All keys share one hash slot, which the script needs on a cluster.
        self._prefix = f"{{{prefix}}}"
        self._limits = limits
        self._clock = clock
        self._errors = RedisError
        self._sink = sink
        self._secrets = secrets
        self._away_until: float | None = None
        self.num_failures = 0

    @classmethod
    def from_url(
        cls, url: str, *, limits: RedisLimits = DEFAULT_LIMITS, sink: ByteSink = SILENT
    ) -> RedisTier:
        try:
            from redis import Redis
        except ModuleNotFoundError as error:
            raise InvalidRequest(
                "A cache in Redis needs its client. Run: pip install redis"
            ) from error
        try:
            password = urlsplit(url).password
            client = Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        # The text of the error may contain a part of the password.
        except ValueError:
            raise InvalidRequest(
                "The URL of the shared cache is not a Redis URL. Write redis://host:6379/0, "
                "rediss://user:password@host:6379/0 or unix:///path/of/socket.",
                param="shared_cache",
            ) from None
        written = (url, *([] if not password else [password, unquote(password)]))
        return cls(client, limits=limits, sink=sink, secrets=tuple(map(Secret, written)))

    def __repr__(self) -> str:
        return "RedisTier"

    def has(self, key: str) -> bool:
        return self._try("look", lambda: bool(self._client.exists(self._name(key))))

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        return self._try(
            "get", lambda: self._download(self._name(key), destination, max_bytes=max_bytes)
        )

    def put(self, key: str, source: Path) -> None:
        size = source.stat().st_size
        if size > min(self._limits.max_object_bytes, self._limits.max_total_bytes):
            return
        self._try("put", lambda: self._upload(self._name(key), source, size))

    def close(self) -> None:
        self._client.close()

    def _download(self, name: str, destination: Path, *, max_bytes: int) -> bool:
        size = self._client.strlen(name)
        if not 0 < size <= max_bytes:
            return False
        self._sink.begin("Downloading from the shared cache", size)
        with destination.open("wb") as writer:
            while writer.tell() < size:
                start = writer.tell()
                chunk = self._client.getrange(name, start, start + CHUNK_BYTES - 1)
                if not chunk:
                    # The entry was evicted during the download.
                    return False
                assert isinstance(chunk, bytes), "the client must not decode replies"
                writer.write(chunk)
                self._sink.add(len(chunk))
        self._client.expire(name, self._limits.ttl_s)
        self._client.zadd(self._used, {name: self._clock()}, xx=True)
        return True

    def _upload(self, name: str, source: Path, size: int) -> bool:
        self._sink.begin("Uploading to the shared cache", size)
        upload = f"{self._prefix}:upload:{secrets.token_hex(8)}"
        with source.open("rb") as reader:
            while chunk := reader.read(CHUNK_BYTES):
                self._client.append(upload, chunk)
                self._client.expire(upload, UPLOAD_TTL_S)
                self._sink.add(len(chunk))
        keys = [upload, name, f"{self._prefix}:sizes", self._used]
        limits = [self._limits.ttl_s, self._limits.max_total_bytes]
        self._client.eval(COMMIT, len(keys), *keys, size, *limits, self._clock())
        return True

    @property
    def _used(self) -> str:
        return f"{self._prefix}:used"

    def _name(self, key: str) -> str:
        return f"{self._prefix}:{key}"

    def _try(self, what: str, action: Callable[[], bool]) -> bool:
        """Run an action; return False if Redis failed, at once while it is known to be down.

        Each outage is logged once as a warning.
        """
        if self._away_until is not None and self._clock() < self._away_until:
            return False
        try:
            done = action()
        except self._errors as error:
            self.num_failures += 1
            level = logging.WARNING if self._away_until is None else logging.DEBUG
            said = scrub(str(error), self._secrets)
            _log.log(level, "The Redis cache failed to %s and is bypassed: %s", what, said)
            self._away_until = self._clock() + AWAY_S
            return False
        if self._away_until is not None:
            self._away_until = None
            _log.info("The Redis cache is available again")
        return done
