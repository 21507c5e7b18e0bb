"""Folders of pushed adapters: in memory where it has room, and a few versions of each name."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Set
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from loramux.errors import StoreFull

_log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
KEEP = 2
"""Versions of a name whose files are kept, the one that is served included."""
_PREFIX = "loramux-pushes-"
# Left free in a place, so that others find some.
_SPARE_BYTES = 64 * 2**20


@dataclass(slots=True)
class _Pushed:
    """The folders of one name, the newest last, and what its pushes have told."""

    folders: list[Path] = field(default_factory=list)
    version: int = 0
    cid: str = ""


class PushedFolders:
    """Belongs to one event loop; its files end with the process, also after a crash.

    Folders of a name are used in turn, so that as many names as versions come and go.
    """

    def __init__(self, places: tuple[Path, ...] = (), *, keep: int = KEEP) -> None:
        """`places`: tried in this order; default: shared memory, then the temporary folder."""
        self._places = places or (SHARED_MEMORY, Path(tempfile.gettempdir()))
        self._keep = keep
        self._roots: dict[Path, Path] = {}
        self._locks: list[int] = []
        self._names: dict[str, _Pushed] = {}
        self._num_staged = 0

    def stage(self, num_bytes: int) -> Path:
        """Make a private folder where so many bytes have room; raises StoreFull."""
        for place in self._places:
            root = self._root(place)
            if root is not None and _free_bytes(root) >= num_bytes + _SPARE_BYTES:
                self._num_staged += 1
                folder = root / f"incoming-{self._num_staged}"
                folder.mkdir(mode=0o700)
                return folder
        raise StoreFull(
            f"No place of this server has room for a push of {num_bytes} bytes: unload adapters, "
            "or give it more shared memory (/dev/shm)."
        )

    def place(self, staged: Path, name: str) -> Path:
        """Move a staged folder to where the next version of a name is read."""
        kept = self._names.get(name, _Pushed()).folders
        digest = blake2b(name.encode(), digest_size=16).hexdigest()
        slots = (staged.parent / f"{digest}-{number}" for number in range(self._keep + 1))
        free = next(slot for slot in slots if slot not in kept)
        shutil.rmtree(free, ignore_errors=True)
        staged.rename(free)
        return free

    def discard(self, folder: Path) -> None:
        """Remove the files of a version that was refused."""
        shutil.rmtree(folder, ignore_errors=True)

    def bound(self, name: str, folder: Path, *, version: int, cid: str, used: Set[str]) -> None:
        """Record what a name means now, and remove the versions that are kept no longer.

        `used`: folders from which adapters of other names may be read.
        """
        known = self._names.setdefault(name, _Pushed())
        known.folders.append(folder)
        known.version, known.cid = version, cid
        while len(known.folders) > self._keep:
            _remove(known.folders.pop(0), used)

    def version_of(self, name: str, cid: str) -> int:
        """Return the version of a name; 0 if it means what was not pushed."""
        known = self._names.get(name)
        return known.version if known is not None and known.cid == cid else 0

    def last_version(self, name: str) -> int:
        known = self._names.get(name)
        return 0 if known is None else known.version

    def forget_all_but(self, names: Set[str], used: Set[str]) -> None:
        """Remove the files of names that were unloaded."""
        for name in self._names.keys() - names:
            for folder in self._names.pop(name).folders:
                _remove(folder, used)

    def _root(self, place: Path) -> Path | None:
        """Return the folder of this process in a place; None if it cannot have one."""
        if place in self._roots:
            return self._roots[place]
        try:
            _remove_abandoned(place)
            root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=place))
            lock = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            _log.info("pushes cannot be kept in %s: %s", place, error)
            return None
        self._locks.append(lock)
        weakref.finalize(self, _end, root, lock)
        self._roots[place] = root
        return root


def _end(root: Path, lock: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    os.close(lock)


def _remove(folder: Path, used: Set[str]) -> None:
    if str(folder) not in used:
        shutil.rmtree(folder, ignore_errors=True)


def _free_bytes(root: Path) -> int:
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def _remove_abandoned(place: Path) -> None:
    """Remove what processes of this user have left that were killed."""
    for root in place.glob(f"{_PREFIX}{os.getuid()}-*"):
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            continue
        try:
            lock = os.open(root / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
        except OSError:
            _log.debug("%s is in use", root)
        finally:
            os.close(lock)
