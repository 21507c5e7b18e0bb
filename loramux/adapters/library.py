"""The store's bytes under the registry's names."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.adapters.store import ContentStore
from loramux.adapters.store_gc import Collected
from loramux.adapters.store_intake import StagedAdapter
from loramux.registry.names import parse_push_reference
from loramux.registry.records import Content, Resolved

# Its database driver is not there on the engine's own machines.
if TYPE_CHECKING:
    from loramux.registry.registry import Registry

DEFAULT_GRACE_S = 3600.0


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
        self, store: ContentStore, registry: Registry, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.store = store
        self.registry = registry
        self._clock = clock

    def push(self, folder: Path, reference: str) -> Pushed:
        """`tenant/name@1.4.2`, or without a version for the next free one."""
        # A name that cannot be is refused before anything is copied.
        parse_push_reference(reference)
        pushed: list[Pushed] = []
        self.store.put_folder(
            folder, then=lambda staged: pushed.append(self._name(staged, reference))
        )
        return pushed[0]

    def _name(self, staged: StagedAdapter, reference: str) -> Pushed:
        record = staged.record
        version, is_new = self.registry.push(
            reference,
            Content(
                cid=record.cid,
                manifest=record.manifest,
                size_bytes=record.size_bytes,
                base_model=staged.config.base_model_name,
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
        self.store.copy_out(resolved.cid, folder)
        return resolved

    def open(self, reference: str, *, sticky_key: str | None = None) -> tuple[Resolved, Path]:
        """What the reference means now, and the folder in the store to load it from."""
        resolved = self.registry.resolve(reference, sticky_key=sticky_key)
        return resolved, self.store.materialize(resolved.cid)

    def gc(self, *, grace_s: float = DEFAULT_GRACE_S) -> Collected:
        """Removes what no version names, unless it was put, opened or used in the last grace_s."""
        since = self._clock() - grace_s
        return self.store.gc(
            lambda: self.registry.cids() | self.registry.used_since(since), min_age_s=grace_s
        )

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
