"""Packed adapters in host memory, ready to be copied into pages; never more than the budget."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from loramux.adapters.packed.image import AdapterImage
from loramux.errors import DoesNotFit
from loramux.memory.policies import EvictionPolicy
from loramux.memory.tiers import TierCounters


class HostTier:
    """Room is reserved before a read begins, so that bytes on their way count as well.

    Registration offers images from another thread; the lock is held for bookkeeping only.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        policy: EvictionPolicy,
        cost_s: Callable[[str, int], float],
        max_adapters: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.max_adapters = max_adapters
        self.counters = TierCounters()
        self._policy = policy
        self._cost_s = cost_s
        self._images: dict[str, AdapterImage] = {}
        self._reserved: dict[str, int] = {}
        self._holds: Counter[str] = Counter()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, cid: str) -> bool:
        return cid in self._images

    def __len__(self) -> int:
        return len(self._images)

    @property
    def used_bytes(self) -> int:
        """Kept and reserved."""
        return self._used_bytes

    def used(self, cid: str, now: float) -> None:
        """A request asked for it, and the device did not have it."""
        self._policy.used(cid, now)

    def get(self, cid: str) -> AdapterImage | None:
        return self._images.get(cid)

    def reserve(self, cid: str, num_bytes: int) -> bool:
        """Room for an image, at the cost of what is worth least; False: all of it is in use now."""
        with self._lock:
            if cid in self._reserved or cid in self._images:
                return True
            if num_bytes > self.budget_bytes:
                raise DoesNotFit(
                    f"Adapter {cid} takes {num_bytes} bytes, and host memory has "
                    f"{self.budget_bytes} for adapters. Raise --host-memory."
                )
            if not self._make_room(num_bytes):
                return False
            self._reserved[cid] = num_bytes
            self._used_bytes += num_bytes
            return True

    def unreserve(self, cid: str) -> None:
        with self._lock:
            self._used_bytes -= self._reserved.pop(cid, 0)

    def put(self, image: AdapterImage) -> None:
        """Takes the place that was reserved for it."""
        with self._lock:
            reserved = self._reserved.pop(image.cid)
            assert reserved == image.num_bytes, "an image is not as large as was said"
            self._images[image.cid] = image

    def offer(self, image: AdapterImage) -> None:
        """Keeps an image that is at hand anyway, if that costs nobody else his place."""
        with self._lock:
            fits = self._used_bytes + image.num_bytes <= self.budget_bytes and self._has_slot()
            if fits and image.cid not in self._images and image.cid not in self._reserved:
                self._images[image.cid] = image
                self._used_bytes += image.num_bytes

    def hold(self, cid: str) -> AdapterImage:
        """Not to be evicted while it is being copied."""
        with self._lock:
            self._holds[cid] += 1
            return self._images[cid]

    def unhold(self, cid: str) -> None:
        with self._lock:
            self._holds[cid] -= 1
            if not self._holds[cid]:
                del self._holds[cid]

    def drop(self, cid: str) -> None:
        with self._lock:
            image = self._images.pop(cid, None)
            if image is not None:
                self._used_bytes -= image.num_bytes

    def check_integrity(self) -> None:
        with self._lock:
            kept = sum(image.num_bytes for image in self._images.values())
            assert self._used_bytes == kept + sum(self._reserved.values()), "host bytes are off"
            assert self._used_bytes <= self.budget_bytes, "host memory is over its budget"
            assert not self._reserved.keys() & self._images.keys(), "reserved and kept"
            assert self._holds.keys() <= self._images.keys(), "an image in use was dropped"
            assert self.max_adapters is None or len(self._images) <= self.max_adapters

    def _has_slot(self) -> bool:
        taken = len(self._images) + len(self._reserved)
        return self.max_adapters is None or taken < self.max_adapters

    def _make_room(self, num_bytes: int) -> bool:
        if self.budget_bytes - self._used_bytes >= num_bytes and self._has_slot():
            return True
        idle = [image for cid, image in self._images.items() if cid not in self._holds]
        free = self.budget_bytes - self._used_bytes
        if free + sum(image.num_bytes for image in idle) < num_bytes:
            return False
        if not idle and not self._has_slot():
            return False
        idle.sort(key=self._worth, reverse=True)
        while self.budget_bytes - self._used_bytes < num_bytes or not self._has_slot():
            victim = idle.pop()
            del self._images[victim.cid]
            self._used_bytes -= victim.num_bytes
            self._policy.evicted(victim.num_bytes / self.budget_bytes)
            self.counters.evictions += 1
        return True

    def _worth(self, image: AdapterImage) -> float:
        cost_s = self._cost_s(image.cid, image.num_bytes)
        return self._policy.worth(image.cid, cost_s=cost_s, size=image.num_bytes)
