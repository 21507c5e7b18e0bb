"""Disk tier: one file per packed adapter, named by its CID, within a byte budget."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from loramux.adapters.identity import CID_PREFIX
from loramux.adapters.packed.file import KnownLayouts, OnSlice, read_image, write_image
from loramux.adapters.packed.image import AdapterImage, Allocate, mapped_buffer
from loramux.adapters.packed.packing import Packing
from loramux.base.private_files import explaining, make_private_folder
from loramux.errors import AdapterRefused
from loramux.memory.cost import CostModel
from loramux.memory.policies import EvictionPolicy
from loramux.memory.records import Placement
from loramux.memory.tiers import TierCounters

_log = logging.getLogger(__name__)
_SUFFIX = ".image"
# Upper limit of the bytes that a file has besides the image.
_FILE_OVERHEAD_BYTES = 2**16


class DiskTier:
    """Keeps image files; their sizes are in placement.disk.

    It is called from loader threads. Several processes may share the folder: files appear
    atomically. The format of an image depends on the base's shapes and the dtype, so that each
    packing has a subfolder of its own; the budget applies to this subfolder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        packing: Packing,
        policy: EvictionPolicy,
        placement: Placement,
        costs: CostModel,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._folder = folder / packing.fingerprint[:16]
        self._policy = policy
        self._costs = costs
        self._lock = threading.Lock()
        self._sizes = placement.disk
        self._layouts = KnownLayouts(packing)
        if budget_bytes > 0:
            with explaining(self._folder, "--disk-folder"):
                make_private_folder(self._folder)
            self._scan()

    def __contains__(self, cid: str) -> bool:
        return cid in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def counters(self) -> TierCounters:
        return self._costs.disk

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.copy().values())

    def read(
        self, cid: str, allocate: Allocate = mapped_buffer, on_slice: OnSlice | None = None
    ) -> AdapterImage | None:
        """Return None if the image is not there; remove a file that is corrupt."""
        if cid not in self._sizes:
            return None
        path = self._path(cid)
        try:
            return read_image(path, cid, self._layouts, allocate, on_slice)
        except FileNotFoundError:
            pass
        except (AdapterRefused, OSError) as error:
            _log.warning("%s", error)
            self.counters.failures += 1
            path.unlink(missing_ok=True)
        with self._lock:
            self._sizes.pop(cid, None)
        return None

    def used(self, cid: str, now: float) -> None:
        """Record a request whose adapter was in no faster tier."""
        self._policy.used(cid, now)

    def put(self, image: AdapterImage) -> bool:
        """Write an image, evicting others; return False if that is not possible."""
        path = self._path(image.cid)
        num_bytes = image.num_bytes + _FILE_OVERHEAD_BYTES
        with self._lock:
            if image.cid in self._sizes:
                return True
            if not self._evict_for(num_bytes):
                return False
            # Counted before it is written: two writers must not take the same free bytes.
            self._sizes[image.cid] = num_bytes
        try:
            write_image(path, image)
        except OSError as error:
            _log.warning("cannot write %s: %s", path, error)
            self.counters.failures += 1
            with self._lock:
                self._sizes.pop(image.cid, None)
            return False
        return True

    def drop(self, cid: str) -> None:
        with self._lock:
            if self._sizes.pop(cid, None) is not None:
                self._path(cid).unlink(missing_ok=True)

    def check_integrity(self) -> None:
        assert self.used_bytes <= self.budget_bytes, "the disk tier is over its budget"

    def _path(self, cid: str) -> Path:
        return self._folder / (cid.rpartition(":")[2] + _SUFFIX)

    def _scan(self) -> None:
        """Take over the files of an earlier process, and removes unfinished ones."""
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_SUFFIX):
                self._sizes[CID_PREFIX + entry.name.removesuffix(_SUFFIX)] = entry.stat().st_size
            elif entry.name.endswith(".partial"):
                Path(entry.path).unlink(missing_ok=True)
        self._evict_for(0)

    def _evict_for(self, num_bytes: int) -> bool:
        if num_bytes > self.budget_bytes:
            return False
        used = sum(self._sizes.values())
        if used + num_bytes <= self.budget_bytes:
            return True
        for cid in sorted(self._sizes, key=self._score):
            freed = self._sizes.pop(cid)
            used -= freed
            self._policy.evicted(freed / max(1, self.budget_bytes))
            self._path(cid).unlink(missing_ok=True)
            self.counters.evictions += 1
            if used + num_bytes <= self.budget_bytes:
                break
        return True

    def _score(self, cid: str) -> float:
        size = self._sizes[cid]
        return self._policy.score(cid, cost_s=self._costs.disk_miss_s(cid, size), size=size)
