"""Removes unreferenced adapters from the store and the bucket, in a crash-safe order."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loramux.adapters.identity import CID_PREFIX, is_digest, parse_cid
from loramux.errors import StoreDamaged
from loramux.store.bucket import StoredObject
from loramux.store.files import StoreLayout, size_of, sync_folder
from loramux.store.record import MAX_RECORD_BYTES, decode_record
from loramux.store.tiers import blob_key, record_key

FindKept = Callable[[], AbstractSet[str]]
"""Returns the content ids that are referenced now."""
RECORDS, BLOBS = "records/", "blobs/"


@dataclass(frozen=True, slots=True)
class Collected:
    num_adapters: int
    num_files: int
    freed_bytes: int


def collect(layout: StoreLayout, kept: AbstractSet[str], *, used_before_ns: int) -> Collected:
    """Remove records first, then the blobs that only they needed; the caller holds the lock."""
    removable = [
        cid
        for cid in layout.cids()
        if cid not in kept and layout.record(cid).stat().st_mtime_ns <= used_before_ns
    ]
    for cid in removable:
        layout.record(cid).unlink()
    sync_folder(layout.records)
    remove_views(layout)
    blobs = unneeded_blobs(layout)
    freed_bytes = sum(size_of(path) for path in blobs)
    for path in blobs:
        path.unlink()
    for folder in {path.parent for path in blobs}:
        sync_folder(folder)
    return Collected(len(removable), len(blobs), freed_bytes)


def remove_views(layout: StoreLayout) -> None:
    alive = {layout.view(cid).name for cid in layout.cids()}
    for view in list(layout.views.iterdir()):
        if view.name not in alive:
            # A partial view must not keep its final name.
            condemned = layout.staging / f"work-view-{view.name}"
            shutil.rmtree(condemned, ignore_errors=True)
            os.rename(view, condemned)
            shutil.rmtree(condemned)


def unneeded_blobs(layout: StoreLayout) -> list[Path]:
    """Return the blobs that no record needs; none while a damaged record hides its needs."""
    needed: set[Path] = set()
    for cid in layout.cids():
        try:
            record = layout.read_record(cid)
        except StoreDamaged:
            return []
        assert record is not None, "the lock keeps records in place"
        needed.update(layout.blob(digest) for digest in record.files.values())
    return [path for path in layout.all_blobs() if path not in needed]


class Bucket(Protocol):
    """The part of ObjectTier that the gc uses."""

    def objects(self) -> Sequence[StoredObject]: ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The objects that a collection may remove."""

    records: list[StoredObject] = field(default_factory=list)
    blobs: list[StoredObject] = field(default_factory=list)
    num_referred: int = 0
    """The number of adapters in the bucket that are referenced."""
    damaged: list[str] = field(default_factory=list)
    """Content ids with broken records. Their blobs are unknown, so no blob is removed."""

    @property
    def objects(self) -> list[StoredObject]:
        return self.records + self.blobs

    @property
    def freed_bytes(self) -> int:
        return sum(found.size_bytes for found in self.objects)


def plan_bucket(bucket: Bucket, find_kept: FindKept, *, older_than: float) -> BucketPlan:
    """Plans the removal of unreferenced objects that were written before `older_than`.

    Newer ones stay, because a push writes its name to the registry last.
    """
    found = bucket.objects()
    kept = find_kept()
    records = {cid: one for one in found if (cid := cid_of(one.key)) is not None}
    removable = {
        cid: one for cid, one in records.items() if cid not in kept and one.modified_at < older_than
    }
    needed, damaged = needed_blobs(bucket, records.keys() - removable.keys())
    blobs = [
        one
        for one in found
        if is_blob(one.key) and one.key not in needed and one.modified_at < older_than
    ]
    num_referred = len(records.keys() & kept)
    return BucketPlan(list(removable.values()), [] if damaged else blobs, num_referred, damaged)


def collect_bucket(bucket: Bucket, plan: BucketPlan, find_kept: FindKept) -> BucketPlan:
    """Remove the planned objects and return them; skip what was named or pushed since.

    Records are removed first, because a tier with a record must have all files of the adapter.
    """
    kept = find_kept()
    records = [one for one in plan.records if cid_of(one.key) not in kept]
    bucket.delete([one.key for one in records])
    left = [cid for one in bucket.objects() if (cid := cid_of(one.key)) is not None]
    needed, damaged = needed_blobs(bucket, left)
    blobs = [] if damaged else [one for one in plan.blobs if one.key not in needed]
    bucket.delete([one.key for one in blobs])
    return BucketPlan(records, blobs, plan.num_referred, damaged)


def needed_blobs(bucket: Bucket, cids: Iterable[str]) -> tuple[set[str], list[str]]:
    """Return the blob keys that the adapters need, and the adapters with damaged records."""
    needed: set[str] = set()
    damaged = []
    with tempfile.TemporaryDirectory(prefix="loramux-gc-") as folder:
        path = Path(folder) / "record"
        for cid in cids:
            key = record_key(parse_cid(cid))
            try:
                if not bucket.get(key, path, max_bytes=MAX_RECORD_BYTES):
                    raise StoreDamaged(f"The record of {cid} is missing or too large.")
                record = decode_record(path.read_bytes(), cid)
            except StoreDamaged:
                damaged.append(cid)
                continue
            needed.update(blob_key(digest.sha256) for digest in record.files.values())
    return needed, damaged


def cid_of(key: str) -> str | None:
    """Return the CID of a record's key, or None for other keys."""
    digest = key.removeprefix(RECORDS)
    return CID_PREFIX + digest if key.startswith(RECORDS) and is_digest(digest) else None


def is_blob(key: str) -> bool:
    return key.startswith(BLOBS) and is_digest(key.removeprefix(BLOBS))
