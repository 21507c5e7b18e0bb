"""The store of a data folder, with what its settings put behind it."""

from __future__ import annotations

from loramux.config.paths import DataPlaces
from loramux.errors import InvalidRequest
from loramux.progress import SILENT, ByteSink
from loramux.sources.config import SourceConfig
from loramux.store.bucket import ObjectTier
from loramux.store.intake import StoreLimits
from loramux.store.redis import RedisTier
from loramux.store.store import DEFAULT_LIMITS, ContentStore
from loramux.store.tiers import CountedTier

SHARED_CACHE, REMOTE_STORE = "shared_cache", "remote_store"


def open_store(
    places: DataPlaces,
    sources: SourceConfig,
    *,
    limits: StoreLimits = DEFAULT_LIMITS,
    sink: ByteSink = SILENT,
) -> ContentStore:
    """Asks neither the cache nor the bucket yet: it opens without a network too."""
    return ContentStore(
        places.store, limits=limits, tiers=open_tiers(places, sources, sink), sink=sink
    )


def open_tiers(places: DataPlaces, sources: SourceConfig, sink: ByteSink) -> list[CountedTier]:
    """Nearest first."""
    tiers = []
    if places.shared_cache is not None:
        cache = RedisTier.from_url(places.shared_cache, sink=sink)
        tiers.append(CountedTier(SHARED_CACHE, cache))
    if places.remote_store is not None:
        refuse_credentials(places.remote_store)
        bucket = ObjectTier(places.remote_store, sources, sink=sink)
        tiers.append(CountedTier(REMOTE_STORE, bucket))
    return tiers


def refuse_credentials(url: str) -> None:
    """Before anything shows the URL."""
    if "@" in url or "?" in url:
        raise InvalidRequest(
            "The URL of the remote store must not hold credentials or a query. Give the keys as "
            "the cloud's own tools take them, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY.",
            param="remote_store",
        )
