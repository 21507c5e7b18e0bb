"""Where things lie in the store's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loramux.adapters.identity import CID_PREFIX, FileDigest
from loramux.store.record import Record, decode_record, digest_of


class StoreLayout:
    """blobs/ab/<sha256>, records/<digest>, views/<digest>/<file>, staging/<work in progress>."""

    def __init__(self, root: Path) -> None:
        self.lock = root / "lock"
        self.blobs = root / "blobs"
        self.records = root / "records"
        self.views = root / "views"
        self.staging = root / "staging"

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.blobs, self.records, self.views, self.staging)

    def blob(self, digest: FileDigest) -> Path:
        return self.blobs / digest.sha256[:2] / digest.sha256

    def record(self, cid: str) -> Path:
        return self.records / digest_of(cid)

    def view(self, cid: str) -> Path:
        return self.views / digest_of(cid)

    def all_blobs(self) -> Iterator[Path]:
        return self.blobs.glob("*/*")

    def cids(self) -> list[str]:
        return sorted(CID_PREFIX + path.name for path in self.records.iterdir())

    def read_record(self, cid: str) -> Record | None:
        """None: no such adapter here. Raises StoreDamaged."""
        try:
            content = self.record(cid).read_bytes()
        except FileNotFoundError:
            return None
        return decode_record(content, cid)

    def size_bytes(self) -> int:
        return sum(size_of(path) for path in self.all_blobs())

    def is_whole(self, record: Record) -> bool:
        """The adapter's view has all files in their full length."""
        view = self.view(record.cid)
        return all(
            size_of(view / name, absent=-1) == digest.size for name, digest in record.files.items()
        )


def size_of(path: Path, *, absent: int = 0) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return absent
