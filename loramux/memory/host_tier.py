"""Host memory tier: packed adapters ready to be copied into pages, within a byte budget."""

from __future__ import annotations

import threading
from collections import Counter

from loramux.adapters.packed.image import AdapterImage
from loramux.errors import DoesNotFit
from loramux.memory.cost import CostModel
from loramux.memory.policies import EvictionPolicy
from loramux.memory.records import Placement
from loramux.memory.tiers import TierCounters


class HostTier:
    """Keeps images in placement.host; memory is reserved before a read starts.

    The lock is held for bookkeeping only.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        policy: EvictionPolicy,
        placement: Placement,
        costs: CostModel,
        max_adapters: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.max_adapters = max_adapters
        self._policy = policy
        self._costs = costs
        self._images = placement.host
        self._reserved: dict[str, int] = {}
        self._num_copies: Counter[str] = Counter()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, cid: str) -> bool:
        return cid in self._images

    def __len__(self) -> int:
        return len(self._images)

    @property
    def counters(self) -> TierCounters:
        return self._costs.host

    @property
    def used_bytes(self) -> int:
        """Returns the bytes of images and reservations."""
        return self._used_bytes

    def used(self, cid: str, now: float) -> None:
        """Record a request whose adapter was not on the device."""
        self._policy.used(cid, now)

    def reserve(self, cid: str, num_bytes: int) -> bool:
        """Reserves memory for an image, evicting others; False if all memory is in use now."""
        with self._lock:
            if cid in self._reserved or cid in self._images:
                return True
            if num_bytes > self.budget_bytes:
                raise DoesNotFit(
                    f"Adapter {cid} takes {num_bytes} bytes, and host memory has "
                    f"{self.budget_bytes} for adapters. Raise --host-memory."
                )
            if not self._evict_for(num_bytes):
                return False
            self._reserved[cid] = num_bytes
            self._used_bytes += num_bytes
            return True

    def cancel_reservation(self, cid: str) -> None:
        with self._lock:
            self._used_bytes -= self._reserved.pop(cid, 0)

    def put(self, image: AdapterImage) -> None:
        """Store an image in the memory that was reserved for it."""
        with self._lock:
            reserved = self._reserved.pop(image.cid)
            assert reserved == image.num_bytes, "the image has another size than was reserved"
            self._images[image.cid] = image

    def begin_copy(self, cid: str) -> AdapterImage:
        """Return the image and keep it from eviction until end_copy()."""
        with self._lock:
            self._num_copies[cid] += 1
            return self._images[cid]

    def end_copy(self, cid: str) -> None:
        with self._lock:
            self._num_copies[cid] -= 1
            if not self._num_copies[cid]:
                del self._num_copies[cid]

    def drop(self, cid: str) -> None:
        with self._lock:
            image = self._images.pop(cid, None)
            if image is not None:
                self._used_bytes -= image.num_bytes

    def check_integrity(self) -> None:
        with self._lock:
            kept = sum(image.num_bytes for image in self._images.values())
            assert self._used_bytes == kept + sum(self._reserved.values()), "wrong used bytes"
            assert self._used_bytes <= self.budget_bytes, "host memory is over its budget"
            assert not self._reserved.keys() & self._images.keys(), "reserved and stored"
            assert self._num_copies.keys() <= self._images.keys(), "evicted during a copy"
            assert self.max_adapters is None or len(self._images) <= self.max_adapters

    def _has_slot(self) -> bool:
        taken = len(self._images) + len(self._reserved)
        return self.max_adapters is None or taken < self.max_adapters

    def _evict_for(self, num_bytes: int) -> bool:
        if self.budget_bytes - self._used_bytes >= num_bytes and self._has_slot():
            return True
        idle = [image for cid, image in self._images.items() if cid not in self._num_copies]
        free = self.budget_bytes - self._used_bytes
        if free + sum(image.num_bytes for image in idle) < num_bytes:
            return False
        if not idle and not self._has_slot():
            return False
        idle.sort(key=self._score, reverse=True)
        while self.budget_bytes - self._used_bytes < num_bytes or not self._has_slot():
            victim = idle.pop()
            del self._images[victim.cid]
            self._used_bytes -= victim.num_bytes
            self._policy.evicted(victim.num_bytes / self.budget_bytes)
            self.counters.evictions += 1
        return True

    def _score(self, image: AdapterImage) -> float:
        cost_s = self._costs.host_miss_s(image.cid, image.num_bytes)
        return self._policy.score(image.cid, cost_s=cost_s, size=image.num_bytes)
