"""Remote tiers of the store, and the transfer of adapters between them and the local store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from loramux.adapters.identity import FileDigest, parse_cid
from loramux.adapters.peft.config import CONFIG_NAME
from loramux.adapters.peft.tokenizer_files import MAX_BYTES
from loramux.backend.host import StoreTierStats
from loramux.errors import AdapterRefused, StoreDamaged
from loramux.store.files import hash_file, seal
from loramux.store.intake import StagedAdapter, StoreLimits, check_header, check_total
from loramux.store.record import (
    MAX_RECORD_BYTES,
    Record,
    check_config_file,
    decode_record,
)

RECORD_NAME = "record"
_log = logging.getLogger(__name__)


class RemoteTier(Protocol):
    """Stores files by key. A tier is not trusted: the store checks every file that it returns.

    A key is `blobs/<sha256>` or `records/<digest of a CID>`: lower case and safe as a path. A key
    always means the same content, so a put over an existing key may be skipped.
    """

    def has(self, key: str) -> bool: ...

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        """Write the file; return False if the key is absent or larger than max_bytes."""
        ...

    def put(self, key: str, source: Path) -> None: ...


class CountedTier:
    """A tier that counts its hits and misses."""

    def __init__(self, name: str, tier: FailingTier) -> None:
        self._name = name
        self._tier = tier
        self._num_hits = 0
        self._num_misses = 0

    @property
    def stats(self) -> StoreTierStats:
        return StoreTierStats(
            tier=self._name,
            hits=self._num_hits,
            misses=self._num_misses,
            failures=self._tier.num_failures,
        )

    def __repr__(self) -> str:
        return repr(self._tier)

    def has(self, key: str) -> bool:
        return self._tier.has(key)

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        is_hit = self._tier.get(key, destination, max_bytes=max_bytes)
        self._num_hits += is_hit
        self._num_misses += not is_hit
        return is_hit

    def put(self, key: str, source: Path) -> None:
        self._tier.put(key, source)


class FailingTier(RemoteTier, Protocol):
    @property
    def num_failures(self) -> int: ...


def blob_key(sha256: str) -> str:
    return f"blobs/{sha256}"


def record_key(digest: str) -> str:
    return f"records/{digest}"


def upload(record: Record, paths: dict[str, Path], tiers: Sequence[RemoteTier]) -> None:
    """Upload an adapter; the record last, so that a tier with the record has all files."""
    keys = [(blob_key(digest.sha256), paths[name]) for name, digest in record.files.items()]
    keys.append((record_key(parse_cid(record.cid)), paths[RECORD_NAME]))
    for tier in tiers:
        found = []
        for key, path in keys:
            if tier.has(key):
                found.append((key, path))
            else:
                tier.put(key, path)
        # gc may have removed them before the record that needs them existed.
        for key, path in found:
            if not tier.has(key):
                tier.put(key, path)


def fetch(
    cid: str, staging: Path, tiers: Sequence[RemoteTier], limits: StoreLimits
) -> StagedAdapter | None:
    """Fetch an adapter; return None if no tier has all its files.

    Tiers nearer than the one that had a file get a copy.
    """
    key = record_key(parse_cid(cid))
    path = staging / RECORD_NAME
    if not get_checked(
        tiers, key, path, max_bytes=MAX_RECORD_BYTES, check=lambda: read_record(path, cid)
    ):
        return None
    record = read_record(path, cid)
    check_total(record, limits)
    paths = {RECORD_NAME: path}
    for name, digest in record.files.items():
        paths[name] = staging / name
        if not fetch_blob(tiers, digest, paths[name]):
            _log.warning("%s has a record but lacks %s in every tier", cid, name)
            return None
    config = None
    if record.config_file is not None:
        config = check_config_file(record, paths[CONFIG_NAME].read_bytes())
    for name in record.covered_files.keys() - MAX_BYTES.keys():
        check_fetched_header(record, paths[name])
    return StagedAdapter(record, None if config is None else config.base_model_name, paths)


def fetch_blob(tiers: Sequence[RemoteTier], digest: FileDigest, path: Path) -> bool:
    def check() -> None:
        if hash_file(path) != digest:
            raise StoreDamaged(f"The content of {digest.sha256} does not match its digest.")

    return get_checked(tiers, blob_key(digest.sha256), path, max_bytes=digest.size, check=check)


def get_checked(
    tiers: Sequence[RemoteTier],
    key: str,
    path: Path,
    *,
    max_bytes: int,
    check: Callable[[], object],
) -> bool:
    for position, tier in enumerate(tiers):
        if not tier.get(key, path, max_bytes=max_bytes):
            path.unlink(missing_ok=True)
            continue
        try:
            check()
        except StoreDamaged as error:
            _log.warning("%s has a bad copy of %s: %s", type(tier).__name__, key, error)
            path.unlink()
            continue
        with path.open("rb") as file:
            seal(file.fileno())
        for nearer in tiers[:position]:
            nearer.put(key, path)
        return True
    return False


def read_record(path: Path, cid: str) -> Record:
    return decode_record(path.read_bytes(), cid)


def check_fetched_header(record: Record, path: Path) -> None:
    try:
        check_header(path)
    except AdapterRefused as error:
        raise StoreDamaged(f"The weights of {record.cid} are broken: {error}") from error
