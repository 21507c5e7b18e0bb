"""The store's bytes under the registry's names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loramux.config.paths import DataPlaces
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    InvalidRequest,
    LoramuxError,
    SourceFailed,
    StoreDamaged,
)
from loramux.progress import SILENT, ByteSink
from loramux.registry.names import parse_push_reference
from loramux.registry.records import Content, Resolved
from loramux.sources.config import SourceConfig
from loramux.store.bucket import ObjectTier
from loramux.store.gc import Collected
from loramux.store.intake import StagedAdapter, StoreLimits
from loramux.store.redis import RedisTier
from loramux.store.store import DEFAULT_LIMITS, ContentStore
from loramux.store.tiers import CountedTier

if TYPE_CHECKING:
    from loramux.registry.registry import Registry

DEFAULT_GRACE_S = 3600.0
T = TypeVar("T")
OpenSource = Callable[[str], AbstractContextManager[Path]]
"""A source's files, for as long as the context lasts."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    tenant: str
    name: str
    version: str
    cid: str
    size_bytes: int
    is_new: bool
    """False: the version was there with the same bytes."""


@dataclass(frozen=True, slots=True)
class LibraryReport:
    num_adapters: int
    num_files: int
    size_bytes: int
    faults: tuple[str, ...]


class AdapterLibrary:
    """Bytes are written before the name that needs them, and removed after it."""

    def __init__(
        self,
        store: ContentStore,
        registry: Registry,
        *,
        open_source: OpenSource | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`open_source`: for what is neither in the store nor behind it; None: it is missing."""
        self.store = store
        self.registry = registry
        self._open_source = open_source
        self._clock = clock

    def push(self, folder: Path, reference: str, *, source: str | None = None) -> Pushed:
        """`tenant/name@1.4.2`, or without a version for the next free one.

        `source`: where the folder's files came from, and may be had again.
        """
        # A name that cannot be is refused before anything is copied.
        parse_push_reference(reference)
        pushed: list[Pushed] = []
        self.store.put_folder(
            folder, then=lambda staged: pushed.append(self._name(staged, reference, source))
        )
        return pushed[0]

    def _name(self, staged: StagedAdapter, reference: str, source: str | None) -> Pushed:
        record = staged.record
        version, is_new = self.registry.push(
            reference,
            Content(
                cid=record.cid,
                manifest=record.manifest,
                size_bytes=record.size_bytes,
                base_model=staged.config.base_model_name,
                source=source,
            ),
        )
        return Pushed(
            tenant=version.adapter.tenant,
            name=version.adapter.name,
            version=version.version,
            cid=version.cid,
            size_bytes=version.size_bytes,
            is_new=is_new,
        )

    def pull(self, reference: str, folder: Path) -> Resolved:
        """A copy of the adapter's files in a new folder, all of them or nothing."""
        resolved = self.registry.resolve(reference)
        self._from_store(resolved.cid, lambda: self.store.copy_out(resolved.cid, folder))
        return resolved

    def open(self, reference: str, *, sticky_key: str | None = None) -> tuple[Resolved, Path]:
        """What the reference means now, and the folder in the store to load it from."""
        resolved = self.registry.resolve(reference, sticky_key=sticky_key)
        return resolved, self.materialize(resolved.cid)

    def materialize(self, cid: str) -> Path:
        """The folder in the store to load it from; what is missing comes from its source again."""
        return self._from_store(cid, lambda: self.store.materialize(cid))

    def gc(self, *, grace_s: float = DEFAULT_GRACE_S) -> Collected:
        """Removes what no version names, unless it was put, opened or used in the last grace_s."""
        since = self._clock() - grace_s
        return self.store.gc(
            lambda: self.registry.cids() | self.registry.used_since(since), min_age_s=grace_s
        )

    def _from_store(self, cid: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except (AdapterNotFound, StoreDamaged) as missing:
            if self._open_source is None:
                raise
            self._fetch_again(cid, missing, self._open_source)
        return read()

    def _fetch_again(self, cid: str, missing: LoramuxError, open_source: OpenSource) -> None:
        """Raises what kept its sources from giving the same bytes."""
        faults: list[LoramuxError] = []
        for source in self.registry.sources_of(cid):
            try:
                with open_source(source) as folder:
                    self.store.put_folder(folder, check=refuse_other(cid, source))
            except LoramuxError as error:
                faults.append(error)
                continue
            _log.warning("%s was gone from the store and came from %s again", cid, source)
            return
        for kind in (AdapterRefused, SourceFailed):
            for fault in faults:
                if isinstance(fault, kind):
                    raise fault from missing
        said = "".join(f" Its source did not give it again: {fault}" for fault in faults)
        raise type(missing)(f"{missing}{said}") from missing

    def verify(self) -> LibraryReport:
        """Reads every byte of the store and every row of the registry."""
        found = self.store.verify()
        missing = [
            f"{name}@{version} needs {cid}, which is neither in the store nor behind it."
            for cid in sorted(self.registry.cids())
            if not self.store.is_available(cid)
            for name, version in self.registry.names_of(cid)
        ]
        faults = (*found.damage, *self.registry.verify(), *missing)
        return LibraryReport(found.num_adapters, found.num_files, found.size_bytes, faults)


def refuse_other(cid: str, source: str) -> Callable[[StagedAdapter], None]:
    def check(staged: StagedAdapter) -> None:
        if staged.record.cid != cid:
            raise AdapterRefused(
                "source_changed",
                f"{cid} is no longer in the store, and its source {source} now has other bytes: "
                f"{staged.record.cid}.",
                fix="Push these as a new version, or push the old bytes again.",
            )

    return check


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
