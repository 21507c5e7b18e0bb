"""Removal from a bucket of what nobody names; its other users may push at the same time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loramux.adapters.identity import CID_PREFIX
from loramux.errors import StoreDamaged
from loramux.store.bucket import StoredObject
from loramux.store.record import MAX_RECORD_BYTES, SHA256, decode_record
from loramux.store.tiers import blob_key, record_key

FindKept = Callable[[], AbstractSet[str]]
"""The content ids that somebody refers to, as of now."""
RECORDS, BLOBS = "records/", "blobs/"


class Bucket(Protocol):
    """ObjectTier, as far as a gc knows it."""

    def objects(self) -> Sequence[StoredObject]: ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What may go."""

    records: list[StoredObject] = field(default_factory=list)
    blobs: list[StoredObject] = field(default_factory=list)
    num_referred: int = 0
    """Adapters that somebody refers to."""
    damaged: list[str] = field(default_factory=list)
    """Content ids that stay with broken records: nobody knows their files, so none are removed."""

    @property
    def objects(self) -> list[StoredObject]:
        return self.records + self.blobs

    @property
    def freed_bytes(self) -> int:
        return sum(found.size_bytes for found in self.objects)


def plan_bucket(bucket: Bucket, find_kept: FindKept, *, older_than: float) -> BucketPlan:
    """Objects that were written at `older_than` or later stay: a push writes names last of all."""
    found = bucket.objects()
    kept = find_kept()
    records = {cid: one for one in found if (cid := cid_of(one.key)) is not None}
    doomed = {
        cid: one for cid, one in records.items() if cid not in kept and one.modified_at < older_than
    }
    needed, damaged = needed_blobs(bucket, records.keys() - doomed.keys())
    blobs = [
        one
        for one in found
        if is_blob(one.key) and one.key not in needed and one.modified_at < older_than
    ]
    num_referred = len(records.keys() & kept)
    return BucketPlan(list(doomed.values()), [] if damaged else blobs, num_referred, damaged)


def collect_bucket(bucket: Bucket, plan: BucketPlan, find_kept: FindKept) -> BucketPlan:
    """Removes what was planned, but for what has been named or pushed since; returns what went.

    Records go first: a tier that has a record has the whole adapter.
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
    """The keys that these adapters need, and which of them cannot say."""
    needed: set[str] = set()
    damaged = []
    with tempfile.TemporaryDirectory(prefix="loramux-gc-") as folder:
        path = Path(folder) / "record"
        for cid in cids:
            key = record_key(cid.removeprefix(CID_PREFIX))
            try:
                if not bucket.get(key, path, max_bytes=MAX_RECORD_BYTES):
                    raise StoreDamaged(f"The record of {cid} is gone, or too large.")
                record = decode_record(path.read_bytes(), cid)
            except StoreDamaged:
                damaged.append(cid)
                continue
            needed.update(blob_key(digest.sha256) for digest in record.files.values())
    return needed, damaged


def cid_of(key: str) -> str | None:
    """None: no record's key."""
    digest = key.removeprefix(RECORDS)
    return CID_PREFIX + digest if key.startswith(RECORDS) and SHA256.fullmatch(digest) else None


def is_blob(key: str) -> bool:
    return key.startswith(BLOBS) and SHA256.fullmatch(key.removeprefix(BLOBS)) is not None
