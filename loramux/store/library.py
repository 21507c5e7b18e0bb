"""Joins the store and the registry: pushes, pulls and opens adapters by name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loramux.adapters.recipe import CombinationOptions
from loramux.adapters.signature import read_signatures
from loramux.base.progress import SILENT, ByteSink
from loramux.config.paths import DataPaths
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    InvalidRequest,
    LoramuxError,
    SourceFailed,
    StoreDamaged,
)
from loramux.registry.names import parse_push_reference
from loramux.registry.records import Content, Resolved, VersionInfo, VersionRecipe
from loramux.sources.config import SourceConfig
from loramux.store.bucket import ObjectTier
from loramux.store.gc import Collected
from loramux.store.intake import StagedAdapter, StoreLimits
from loramux.store.redis import RedisTier
from loramux.store.store import DEFAULT_LIMITS, ContentStore
from loramux.store.tiers import CountedTier
from loramux.types.modality import Modality

if TYPE_CHECKING:
    from loramux.registry.audit import Actor
    from loramux.registry.registry import Registry

DEFAULT_GRACE_S = 3600.0
T = TypeVar("T")
OpenSource = Callable[[str], AbstractContextManager[Path]]
"""Opens a source; its files exist as long as the context."""
_log = logging.getLogger(__name__)
SHARED_CACHE, REMOTE_STORE = "shared_cache", "remote_store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    tenant: str
    name: str
    version: str
    cid: str
    size_bytes: int
    is_new: bool
    """False if the version already existed with the same content."""
    recipe: VersionRecipe | None = None
    """What a version without files is made of."""
    signed_by: str | None = None
    """The id of the key whose signature was verified."""
    modality: Modality = "text"


@dataclass(frozen=True, slots=True)
class LibraryReport:
    num_adapters: int
    num_files: int
    size_bytes: int
    faults: tuple[str, ...]


class AdapterLibrary:
    """Writes files before the name that needs them, and removes them after it."""

    def __init__(
        self,
        store: ContentStore,
        registry: Registry,
        *,
        open_source: OpenSource | None = None,
        require_signed: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`open_source` fetches adapters again that neither the store nor its tiers have."""
        self.require_signed = require_signed
        self.store = store
        self.registry = registry
        self._open_source = open_source
        self._clock = clock

    def acting(self, actor: Actor) -> AdapterLibrary:
        """Return this library with another actor of its changes."""
        acting = copy(self)
        acting.registry = self.registry.acting(actor)
        return acting

    def push(
        self,
        folder: Path,
        reference: str,
        *,
        source: str | None = None,
        signatures: tuple[str, ...] = (),
        require_signed: bool = False,
        modality: Modality | None = None,
    ) -> Pushed:
        """Store a folder under `tenant/name@1.4.2`, or under the next free version without one.

        `source` is recorded as the place from which the files can be fetched again. Without
        `signatures` those in the folder are verified. A signature is needed if it is required here,
        by this library or by the tenant. `modality`: what the adapter is for; None: its files
        tell. An adapter of an image model may be a file too.
        """
        # An invalid name is refused before files are copied.
        parse_push_reference(reference)
        place = folder if folder.is_dir() else folder.parent
        given = signatures or read_signatures(place)
        is_required = require_signed or self.require_signed
        pushed: list[Pushed] = []

        def content_of(staged: StagedAdapter) -> Content:
            return Content(
                cid=staged.record.cid,
                manifest=staged.record.manifest,
                size_bytes=staged.record.size_bytes,
                base_model=staged.base_model,
                source=source,
                signatures=given,
            )

        def check(staged: StagedAdapter) -> None:
            self.registry.check_push(reference, content_of(staged), require_signed=is_required)

        def name(staged: StagedAdapter) -> None:
            content = content_of(staged)
            found = self.registry.push(reference, content, require_signed=is_required)
            pushed.append(_pushed(*found))

        self.store.put_folder(folder, check=check, then=name, modality=modality)
        return pushed[0]

    def push_recipe(
        self,
        terms: Iterable[tuple[str, float]],
        reference: str,
        options: CombinationOptions,
        *,
        any_base: bool = False,
    ) -> Pushed:
        """Store a version that is made of other versions, given by name and weight.

        It has no files. Its parts cannot be removed while it exists.
        """
        return _pushed(*self.registry.push_recipe(reference, terms, options, any_base=any_base))

    def pull(self, reference: str, folder: Path) -> Resolved:
        """Copy the adapter's files into a new folder, all or none of them."""
        resolved = self.registry.resolve(reference)
        _refuse_recipe(resolved)
        self._from_store(resolved.cid, lambda: self.store.copy_out(resolved.cid, folder))
        return resolved

    def open(self, reference: str, *, sticky_key: str | None = None) -> tuple[Resolved, Path]:
        """Resolve a reference; return it with the folder in the store to load it from."""
        resolved = self.registry.resolve(reference, sticky_key=sticky_key)
        _refuse_recipe(resolved)
        return resolved, self.materialize(resolved.cid)

    def materialize(self, cid: str) -> Path:
        """Return the folder in the store to load; a missing adapter is fetched from its source."""
        return self._from_store(cid, lambda: self.store.materialize(cid))

    def gc(self, *, grace_s: float = DEFAULT_GRACE_S) -> Collected:
        """Remove adapters that no version names and that were not used in the last grace_s."""
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
        """Fetch an adapter from its sources again; raise if none has the same content."""
        faults: list[LoramuxError] = []
        for source in self.registry.sources_of(cid):
            try:
                with open_source(source) as folder:
                    self.store.put_folder(
                        folder,
                        check=refuse_other(cid, source),
                        modality=self.registry.modality_of(cid),
                    )
            except LoramuxError as error:
                faults.append(error)
                continue
            _log.warning("%s was missing from the store and was fetched from %s again", cid, source)
            return
        for kind in (AdapterRefused, SourceFailed):
            for fault in faults:
                if isinstance(fault, kind):
                    raise fault from missing
        said = "".join(
            f" It could not be fetched from its source again: {fault}" for fault in faults
        )
        raise type(missing)(f"{missing}{said}") from missing

    def verify(self) -> LibraryReport:
        """Verify every file of the store and every row of the registry."""
        found = self.store.verify()
        missing = [
            f"{name}@{version} needs {cid}, which neither the store nor its tiers have."
            for cid in sorted(self.registry.cids() - self.registry.recipe_cids())
            if not self.store.is_available(cid)
            for name, version in self.registry.names_of(cid)
        ]
        faults = (*found.damage, *self.registry.verify(), *missing)
        return LibraryReport(found.num_adapters, found.num_files, found.size_bytes, faults)


def _pushed(version: VersionInfo, is_new: bool) -> Pushed:
    return Pushed(
        tenant=version.adapter.tenant,
        name=version.adapter.name,
        version=version.version,
        cid=version.cid,
        size_bytes=version.size_bytes,
        is_new=is_new,
        recipe=version.recipe,
        signed_by=version.signed_by,
        modality=version.modality,
    )


def _refuse_recipe(resolved: Resolved) -> None:
    if resolved.recipe is not None:
        name = resolved.cid if resolved.name is None else f"{resolved.tenant}/{resolved.name}"
        raise InvalidRequest(
            f"{name} is a recipe, {resolved.recipe}, and has no files. Name its parts, or write it "
            "to files with loramux merge and --out.",
        )


def refuse_other(cid: str, source: str) -> Callable[[StagedAdapter], None]:
    def check(staged: StagedAdapter) -> None:
        if staged.record.cid != cid:
            raise AdapterRefused(
                "source_changed",
                f"{cid} is no longer in the store, and its source {source} now has other content: "
                f"{staged.record.cid}.",
                fix="Push this content as a new version, or push the old content again.",
            )

    return check


def open_store(
    places: DataPaths,
    sources: SourceConfig,
    *,
    limits: StoreLimits = DEFAULT_LIMITS,
    sink: ByteSink = SILENT,
) -> ContentStore:
    """Open the store with its tiers; it connects to neither, so it works without a network."""
    return ContentStore(
        places.store, limits=limits, tiers=open_tiers(places, sources, sink), sink=sink
    )


def open_tiers(places: DataPaths, sources: SourceConfig, sink: ByteSink) -> list[CountedTier]:
    """Return the tiers, the nearest first."""
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
    """Refuses a URL with credentials, before any message can show it."""
    if "@" in url or "?" in url:
        raise InvalidRequest(
            "The URL of the remote store must not hold credentials or a query. Give the keys in "
            "the environment variables of the cloud's tools, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY.",
            param="remote_store",
        )
