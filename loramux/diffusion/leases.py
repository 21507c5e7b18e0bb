"""Brings the adapters of images to the device, and keeps them there until the last step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from loramux.diffusion.memory import ImageMemory
from loramux.errors import DoesNotFit, LoramuxError
from loramux.memory.tiers import AdapterState
from loramux.types.image import ImageRequest


class AdapterLeases:
    """The images that wait for adapters or hold them, by request id.

    An image waits for its adapters from its arrival on, leases all of them when it begins, and
    returns them after its last step. If the memory is taken by images that run, the first image in
    the fair order that lacks adapters gets what they return: images after it do not begin before.
    """

    def __init__(self, memory: ImageMemory) -> None:
        self._memory = memory
        self._residency = memory.residency
        self._waiting: dict[str, tuple[str, ...]] = {}
        self._held: dict[str, list[str]] = {}
        self._reserved: str | None = None
        """The waiting image that adapters are kept for as they arrive."""

    def arrive(self, request: ImageRequest) -> AdapterState | None:
        """Start to load what is missing; return the slowest tier that has an adapter.

        Raises AdapterNotFound, or DoesNotFit for adapters that could never be there at once.
        """
        if not request.cids:
            return None
        found = self._residency.tier_found(request.cids)
        self._residency.add_waiters(request.cids)
        self._waiting[request.request_id] = request.cids
        return found

    def leave(self, request_id: str) -> None:
        """Return everything that an image waits for or holds."""
        cids = self._waiting.pop(request_id, None)
        if cids is not None:
            self._residency.remove_waiters(cids)
        self._residency.release(self._held.pop(request_id, []))
        if self._reserved == request_id:
            self._reserved = None

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def lacks_adapters(self, request_id: str) -> bool:
        cids = self._waiting.get(request_id, ())
        return not all(cid in self._residency for cid in cids)

    def failures(self) -> Iterator[tuple[str, LoramuxError]]:
        """Yield the images whose adapters cannot be loaded; call it after the loads moved."""
        for request_id, cids in list(self._waiting.items()):
            try:
                self._residency.is_ready(cids)
            except LoramuxError as error:
                yield request_id, error
        reserved = self._reserved
        if reserved is not None and self._is_stuck(reserved):
            yield (
                reserved,
                DoesNotFit(
                    "Its adapters do not fit into the memory for adapters beside the pinned ones."
                ),
            )

    def admission(self) -> Callable[[str], bool]:
        """Return what tells of each image, in the fair order, whether it may run in this step."""
        is_blocked = False

        def may_run(request_id: str) -> bool:
            nonlocal is_blocked
            cids = self._waiting.get(request_id)
            if cids is None:
                return True
            if not self.lacks_adapters(request_id):
                return not is_blocked or request_id == self._reserved
            if self._reserved is None:
                self._reserved = request_id
                self._residency.prioritize(cids)
            if self._reserved == request_id:
                self._keep(request_id, cids)
                is_blocked = self._residency.missing_pages(cids) > 0
            return False

        return may_run

    def begin(self, request_id: str) -> None:
        """Leases all adapters of an image that may run."""
        cids = self._waiting.pop(request_id, None)
        if cids is None:
            return
        held = self._held.setdefault(request_id, [])
        rest = [cid for cid in cids if cid not in held]
        is_leased = self._residency.acquire(rest)
        assert is_leased, "an adapter is missing"
        held += rest
        self._residency.remove_waiters(cids)
        if self._reserved == request_id:
            self._reserved = None

    def counts(self) -> Counter[str]:
        """Return the number of leases of each adapter."""
        return Counter(cid for cids in self._held.values() for cid in cids)

    def waiting_counts(self) -> Counter[str]:
        """Return the number of images that wait for each adapter."""
        return Counter(cid for cids in self._waiting.values() for cid in cids)

    def running_counts(self) -> Counter[str]:
        """Return the number of images that have begun with each adapter."""
        begun = (cids for name, cids in self._held.items() if name not in self._waiting)
        return Counter(cid for cids in begun for cid in cids)

    def check_integrity(self) -> None:
        self._memory.check_integrity(self.counts())
        for request_id, cids in self._held.items():
            assert len(set(cids)) == len(cids), "an adapter is leased twice"
            assert request_id not in self._waiting or request_id == self._reserved
        assert self._reserved is None or self._reserved in self._waiting

    def _keep(self, request_id: str, cids: tuple[str, ...]) -> None:
        """Leases those that have arrived: the others must not evict them."""
        held = self._held.setdefault(request_id, [])
        for cid in cids:
            if cid not in held and self._residency.acquire([cid]):
                held.append(cid)

    def _is_stuck(self, request_id: str) -> bool:
        """Whether nothing that ends by itself holds the memory that an image lacks."""
        if self._residency.is_loading or any(
            cids for name, cids in self._held.items() if name != request_id
        ):
            return False
        return self._residency.missing_pages(self._waiting[request_id]) > 0
