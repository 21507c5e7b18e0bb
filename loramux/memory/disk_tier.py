"""Packed adapters on disk, by content id: one read brings one to host memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from loramux.adapters.identity import CID_PREFIX
from loramux.adapters.packed.file import KnownLayouts, OnSlice, read_image, write_image
from loramux.adapters.packed.image import AdapterImage, Allocate, mapped_buffer
from loramux.adapters.packed.packing import Packing
from loramux.errors import AdapterRefused
from loramux.memory.policies import EvictionPolicy, miss_cost_s
from loramux.memory.tiers import TierCounters

_log = logging.getLogger(__name__)
_SUFFIX = ".image"
# What reading and checking a PEFT folder takes, roughly.
_SOURCE_S = 1e-2
_SOURCE_BYTES_PER_S = 2e8


class DiskTier:
    """Used from worker threads. Several processes may share the folder: files appear whole.

    What the images look like depends on the base's shapes and the dtype, so these choose a folder
    of their own; the budget is per such folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        packing: Packing,
        policy: EvictionPolicy,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.counters = TierCounters()
        self.is_held_above: Callable[[str], bool] = lambda cid: False
        """Whether host memory has it too."""
        self._folder = folder / packing.fingerprint[:16]
        self._policy = policy
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._layouts = KnownLayouts(packing)
        if budget_bytes > 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._look()

    def __contains__(self, cid: str) -> bool:
        return cid in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.copy().values())

    def read(
        self, cid: str, allocate: Allocate = mapped_buffer, on_slice: OnSlice | None = None
    ) -> AdapterImage | None:
        """None: it is not here (any more); a file that is not right is removed."""
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
        """A request asked for it, and no faster tier had it."""
        self._policy.used(cid, now)

    def offer(self, image: AdapterImage) -> None:
        """Keeps an image that is at hand anyway, if that costs nobody else his place."""
        if self.used_bytes + image.num_bytes + 2**16 <= self.budget_bytes:
            self.put(image)

    def put(self, image: AdapterImage) -> bool:
        """False: there is no room for it, or the disk is full; both are fine."""
        path = self._path(image.cid)
        num_bytes = image.num_bytes + 2**16
        with self._lock:
            if image.cid in self._sizes:
                return True
            if not self._make_room(num_bytes):
                return False
            # Counted before it is written, so that two writers cannot both take the last bytes.
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

    def _look(self) -> None:
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_SUFFIX):
                cid = CID_PREFIX + entry.name.removesuffix(_SUFFIX)
                self._sizes[cid] = entry.stat().st_size
            elif entry.name.endswith(".partial"):
                Path(entry.path).unlink(missing_ok=True)
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self.budget_bytes:
            return False
        used = sum(self._sizes.values())
        if used + num_bytes <= self.budget_bytes:
            return True
        for cid in sorted(self._sizes, key=self._worth):
            freed = self._sizes.pop(cid)
            used -= freed
            self._policy.evicted(freed / max(1, self.budget_bytes))
            self._path(cid).unlink(missing_ok=True)
            self.counters.evictions += 1
            if used + num_bytes <= self.budget_bytes:
                break
        return True

    def _worth(self, cid: str) -> float:
        size = self._sizes[cid]
        cost_s = miss_cost_s(
            _SOURCE_S + size / _SOURCE_BYTES_PER_S, is_held_above=self.is_held_above(cid)
        )
        return self._policy.worth(cid, cost_s=cost_s, size=size)
