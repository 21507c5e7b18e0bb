"""Verifies every file of the store against its digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.identity import FileDigest
from loramux.errors import StoreDamaged
from loramux.store.files import StoreLayout, hash_file
from loramux.store.record import Record, check_config_file


@dataclass(frozen=True, slots=True)
class StoreReport:
    num_adapters: int
    num_files: int
    size_bytes: int
    damage: tuple[str, ...]
    """One sentence for each fault."""

    @property
    def is_sound(self) -> bool:
        return not self.damage


def verify_store(layout: StoreLayout) -> StoreReport:
    """Hashes all files without the store's lock, so that it blocks no other process.

    Files that gc removes during the check do not count as damage.
    """
    damage: list[str] = []
    found: dict[Path, FileDigest] = {}
    for path in list(layout.all_blobs()):
        digest = hash_if_there(path)
        if digest is None:
            continue
        found[path] = digest
        if digest.sha256 != path.name:
            damage.append(f"The file {path.name} has the wrong content ({digest.sha256}).")
    cids = layout.cids()
    for cid in cids:
        damage += check_adapter(layout, cid, found)
    size_bytes = sum(digest.size for digest in found.values())
    return StoreReport(len(cids), len(found), size_bytes, tuple(damage))


def check_adapter(layout: StoreLayout, cid: str, found: dict[Path, FileDigest]) -> list[str]:
    try:
        record = layout.read_record(cid)
        if record is None:
            return []
        damage = check_files(layout, record, found)
        # If gc removed the record meanwhile, its files may be removed too.
        return damage if layout.record(cid).exists() else []
    except StoreDamaged as error:
        return [str(error)]


def check_files(layout: StoreLayout, record: Record, found: dict[Path, FileDigest]) -> list[str]:
    damage: list[str] = []
    for name, digest in record.files.items():
        path = layout.blob(digest)
        actual = found.get(path) or hash_if_there(path)
        if actual is None:
            damage.append(f"{record.cid} lacks {name}.")
        elif actual != digest:
            damage.append(f"{record.cid} has the wrong content in {name}.")
    if not damage and record.config_file is not None:
        check_config_file(record, layout.blob(record.config_file).read_bytes())
    return damage


def hash_if_there(path: Path) -> FileDigest | None:
    try:
        return hash_file(path)
    except FileNotFoundError:
        return None
