"""The content-addressed store: adapters on disk by CID, each file once, complete or absent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from loramux.adapters.identity import FileDigest, parse_cid
from loramux.adapters.peft.folder import refusing_os_errors
from loramux.adapters.peft.safetensors import read_head, read_metadata
from loramux.backend.host import StoreTierStats
from loramux.base.private_files import PRIVATE_FOLDER, explaining
from loramux.base.progress import SILENT, ByteSink
from loramux.errors import AdapterNotFound, InvalidRequest, StoreDamaged, StoreFull
from loramux.store.check import StoreReport, verify_store
from loramux.store.files import (
    StagingArea,
    StoreLayout,
    StoreLock,
    copy_hashed,
    hash_file,
    link_or_copy,
    make_folder,
    move_into_place,
    size_of,
    sync_folder,
    write_file,
)
from loramux.store.gc import Collected, collect
from loramux.store.intake import StagedAdapter, StoreLimits, stage_folder
from loramux.store.record import Record
from loramux.store.tiers import RECORD_NAME, CountedTier, RemoteTier, fetch, record_key, upload
from loramux.types.modality import Modality

PULL_PREFIX = ".loramux-pull-"
WRITABLE = 0o644
NS_PER_S = 10**9
DEFAULT_LIMITS = StoreLimits()
_log = logging.getLogger(__name__)


class ContentStore:
    """A store in one folder; any thread of any process that shares it may call any method."""

    def __init__(
        self,
        root: Path,
        *,
        limits: StoreLimits = DEFAULT_LIMITS,
        tiers: Sequence[RemoteTier] = (),
        sink: ByteSink = SILENT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`tiers`, the nearest first, get each adapter that is put and supply missing ones."""
        self.root = root.expanduser().resolve()
        self._layout = StoreLayout(self.root)
        self._limits = limits
        self._tiers = tuple(tiers)
        self._sink = sink
        self._clock = clock
        with explaining(self.root, "LORAMUX_DATA or --data"):
            for folder in self._layout.folders:
                make_folder(folder)
        self._lock = StoreLock(self._layout.lock)
        self._staging = StagingArea(self._layout.staging, prefix="work-", lock=self._lock)
        with self._lock.held():
            self._staging.sweep()

    def put_folder(
        self,
        folder: Path,
        *,
        check: Callable[[StagedAdapter], None] | None = None,
        then: Callable[[StagedAdapter], None] | None = None,
        modality: Modality | None = None,
    ) -> str:
        """Store a folder and return its CID; an exception of `check` prevents it.

        `modality`: what the adapter is for; None: its files tell. An adapter of an image model may
        be a file too.

        `then` runs under the lock that gc needs, so that gc cannot remove the adapter before `then`
        has named it.
        """
        with self._staging.folder() as staging:
            staged = stage_folder(folder, staging, self._limits, self._sink, modality)
            if check is not None:
                check(staged)
            self._check_room(staged.record)
            staged.paths[RECORD_NAME] = staging / RECORD_NAME
            write_file(staged.paths[RECORD_NAME], staged.record.encode())
            upload(staged.record, staged.paths, self._tiers)
            self._commit(staged, then)
        return staged.record.cid

    def has(self, cid: str) -> bool:
        """Return whether the adapter is in the folder; the tiers are not asked."""
        return self._layout.record(cid).exists()

    def is_available(self, cid: str) -> bool:
        """Return whether the adapter is in the folder or in a tier."""
        key = record_key(parse_cid(cid))
        return self.has(cid) or any(tier.has(key) for tier in self._tiers)

    def tier_stats(self) -> list[StoreTierStats]:
        return [tier.stats for tier in self._tiers if isinstance(tier, CountedTier)]

    def cids(self) -> list[str]:
        return self._layout.cids()

    def size_bytes(self) -> int:
        return self._layout.size_bytes()

    def read(self, cid: str) -> Record:
        """Return the record; an adapter that is missing or damaged is fetched from a tier."""
        record = self._peek(cid)
        if record is not None:
            return record
        self._restore(cid)
        return self._must_read(cid)

    def metadata(self, cid: str) -> dict[str, object]:
        """Return the metadata in the header of an adapter's weights; {} if it has no weights."""
        digest = self.read(cid).weights
        if digest is None:
            return {}
        path = self._layout.blob(digest)
        with refusing_os_errors(path), path.open("rb") as file:
            return read_metadata(read_head(file, digest.size))

    def materialize(self, cid: str) -> Path:
        """Return a read-only PEFT folder inside the store; its files were hashed when it was made.

        A later reader must hash the files again, as read_adapter does.
        """
        record = self.read(cid)
        if not self._layout.is_whole(record):
            self._make_view(self._make_sound(record))
        self._set_used_time(cid)
        return self._layout.view(cid)

    def copy_out(self, cid: str, folder: Path) -> Path:
        """Copy all files of an adapter, or none, into a new or empty folder."""
        folder = folder.expanduser().absolute()
        refuse_filled(folder)
        record = self._make_sound(self.read(cid))
        folder.parent.mkdir(parents=True, exist_ok=True)
        area = StagingArea(folder.parent, prefix=PULL_PREFIX, lock=self._lock)
        with self._lock.held():
            area.sweep()
        with area.folder() as staging:
            copy = staging / "adapter"
            copy.mkdir()
            self._sink.begin("Copying", record.size_bytes)
            for name, digest in record.files.items():
                self._copy_file(record, digest, copy / name)
            sync_folder(copy)
            try:
                copy.rename(folder)
            except OSError:
                refuse_filled(folder)
                raise
            sync_folder(folder.parent)
        return folder

    def verify(self) -> StoreReport:
        """Hashes every file of the store."""
        return verify_store(self._layout)

    def gc(self, find_kept: Callable[[], AbstractSet[str]], *, min_age_s: float = 0.0) -> Collected:
        """Remove adapters that are not kept and were not put or opened in the last min_age_s.

        `find_kept` runs under the lock, so that no adapter can be put after its answer.
        """
        with self._lock.held():
            self._staging.sweep()
            used_before_ns = int((self._clock() - min_age_s) * NS_PER_S)
            return collect(self._layout, find_kept(), used_before_ns=used_before_ns)

    def _commit(self, staged: StagedAdapter, then: Callable[[StagedAdapter], None] | None) -> None:
        known = self._peek(staged.record.cid)
        digests = set(staged.record.files.values()) | set(known.files.values() if known else ())
        # Hashed before the lock is taken, because the lock is held for renames only.
        sound = {digest for digest in digests if self._is_sound(digest)}
        with self._lock.held():
            # Another put may have stored some of them meanwhile, and views may link to these.
            sound |= {digest for digest in digests - sound if self._is_sound(digest)}
            self._check_room(staged.record)
            if not self._touch_existing(staged.record.cid, sound):
                self._keep(staged, sound)
            if then is not None:
                then(staged)

    def _peek(self, cid: str) -> Record | None:
        """Return the record, or None if it is absent or damaged; a damaged one gets replaced."""
        try:
            return self._layout.read_record(cid)
        except StoreDamaged:
            return None

    def _touch_existing(self, cid: str, sound: AbstractSet[FileDigest]) -> bool:
        """Mark the adapter as used; return False if it is absent or damaged."""
        existing = self._peek(cid)
        if existing is None or not all(
            digest in sound and self._layout.blob(digest).exists()
            for digest in existing.files.values()
        ):
            return False
        self._set_used_time(cid)
        return True

    def _keep(self, staged: StagedAdapter, sound: AbstractSet[FileDigest]) -> None:
        for name, digest in staged.record.files.items():
            self._keep_blob(staged.paths[name], digest, sound)
        cid = staged.record.cid
        move_into_place(staged.paths[RECORD_NAME], self._layout.record(cid))
        self._set_used_time(cid)

    def _keep_blob(self, source: Path, digest: FileDigest, sound: AbstractSet[FileDigest]) -> None:
        destination = self._layout.blob(digest)
        if digest in sound and destination.exists():
            return
        if destination.exists():
            self._drop_views(digest)
        move_into_place(source, destination)

    def _drop_views(self, damaged: FileDigest) -> None:
        """Remove the views that link to a damaged file which is about to be replaced."""
        blob = self._layout.blob(damaged)
        for path in list(self._layout.views.glob("*/*")):
            if path.samefile(blob):
                path.unlink()

    def _set_used_time(self, cid: str) -> None:
        now_ns = int(self._clock() * NS_PER_S)
        try:
            os.utime(self._layout.record(cid), ns=(now_ns, now_ns))
        except FileNotFoundError as error:
            raise not_found(cid) from error
        except OSError as error:
            # A folder that cannot be written to can be read: its adapters are served.
            _log.warning("the use of %s cannot be recorded: %s", cid, error)

    def _check_room(self, record: Record) -> None:
        if self._limits.max_store_bytes is None:
            return
        missing = {d for d in record.files.values() if not self._layout.blob(d).exists()}
        needed = self._layout.size_bytes() + sum(digest.size for digest in missing)
        if missing and needed > self._limits.max_store_bytes:
            raise StoreFull(
                f"The store may hold {self._limits.max_store_bytes} bytes and would need {needed}. "
                "Remove versions and run gc, or raise the limit."
            )

    def _is_sound(self, digest: FileDigest) -> bool:
        path = self._layout.blob(digest)
        return size_of(path, absent=-1) == digest.size and hash_file(path) == digest

    def _make_sound(self, record: Record) -> Record:
        """Hashes the adapter's files and replaces damaged ones from a tier."""
        if all(self._is_sound(digest) for digest in record.files.values()):
            return record
        self._restore(record.cid)
        restored = self._must_read(record.cid)
        if not all(self._is_sound(digest) for digest in restored.files.values()):
            raise StoreDamaged(
                f"The files of {record.cid} in the store are damaged. Push the adapter again."
            )
        return restored

    def _restore(self, cid: str) -> None:
        if not self._tiers:
            return
        with self._staging.folder() as staging:
            staged = fetch(cid, staging, self._tiers, self._limits)
            if staged is not None:
                self._commit(staged, None)

    def _must_read(self, cid: str) -> Record:
        record = self._layout.read_record(cid)
        if record is None:
            raise not_found(cid)
        return record

    def _make_view(self, record: Record) -> None:
        with self._staging.folder() as staging, self._lock.held():
            # gc may have removed it first.
            self._must_read(record.cid)
            if self._layout.is_whole(record):
                return
            made, view = staging / "view", self._layout.view(record.cid)
            made.mkdir(mode=PRIVATE_FOLDER)
            for name, digest in record.files.items():
                link_or_copy(self._layout.blob(digest), made / name)
            if view.exists():
                view.rename(staging / "broken")
            move_into_place(made, view)

    def _copy_file(self, record: Record, digest: FileDigest, destination: Path) -> None:
        blob = self._layout.blob(digest)
        copied = copy_hashed(blob, destination, max_bytes=digest.size, sink=self._sink)
        if copied != digest:
            raise StoreDamaged(f"A file of {record.cid} was damaged while it was copied.")
        destination.chmod(WRITABLE)


def not_found(cid: str) -> AdapterNotFound:
    return AdapterNotFound(f"No adapter with content id {cid} is in the store.")


def refuse_filled(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest(f"{folder} exists and is not an empty folder. Name a new one.")
