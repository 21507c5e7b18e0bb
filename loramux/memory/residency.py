"""Which adapters have their weights in pool pages: loaded on demand, oldest use leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from loramux.adapters.image import AdapterImage, AdapterLayout
from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.pool import PagePool


class ImageSource(Protocol):
    def num_elements(self, cid: str) -> int: ...

    def load(self, cid: str) -> AdapterImage: ...


@dataclass(slots=True)
class ResidentAdapter:
    cid: str
    layout: AdapterLayout
    page_ids: list[int]
    num_leases: int = 0


class AdapterResidency:
    """A leased adapter is in use by a running sequence and is never evicted."""

    def __init__(
        self,
        *,
        pool: PagePool,
        pages: PageAllocator,
        images: ImageSource,
    ) -> None:
        self._pool = pool
        self._pages = pages
        self._images = images
        # Least recently used first.
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self.num_loads = 0
        self.num_evictions = 0

    @property
    def resident(self) -> Mapping[str, ResidentAdapter]:
        return self._resident

    def __contains__(self, cid: str) -> bool:
        return cid in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def num_pages(self, cid: str) -> int:
        return self._pool.pages_for_elements(self._images.num_elements(cid))

    def acquire(self, cids: Iterable[str]) -> bool:
        """Leases all of them, loading what is missing; False: no room, and nothing was leased."""
        leased: list[str] = []
        for cid in cids:
            try:
                resident = self._resident.get(cid) or self._load(cid)
            except BaseException:
                self.release(leased)
                raise
            if resident is None:
                self.release(leased)
                return False
            resident.num_leases += 1
            self._resident.move_to_end(cid)
            leased.append(cid)
        return True

    def release(self, cids: Iterable[str]) -> None:
        for cid in cids:
            self._resident[cid].num_leases -= 1

    def make_room(self, num_pages: int) -> bool:
        """Evicts idle adapters until num_pages are free; False: cannot, and nothing was evicted."""
        if self.num_available < num_pages:
            return False
        idle = [r for r in self._resident.values() if r.num_leases == 0]
        for resident in idle:
            if self._pages.num_free >= num_pages:
                break
            self.evict(resident.cid)
        return True

    @property
    def num_available(self) -> int:
        """Pages that are free or could be freed by evicting idle adapters."""
        idle = sum(len(r.page_ids) for r in self._resident.values() if r.num_leases == 0)
        return self._pages.num_free + idle

    def evict(self, cid: str) -> None:
        resident = self._resident[cid]
        assert resident.num_leases == 0, f"{cid} is in use"
        self._pages.release(_owner(cid), resident.page_ids)
        del self._resident[cid]
        self.num_evictions += 1

    def claims(self) -> dict[Owner, list[int]]:
        return {_owner(cid): resident.page_ids for cid, resident in self._resident.items()}

    def check_integrity(self, leases: dict[str, int]) -> None:
        """`leases`: how many running sequences use each adapter."""
        held = {cid: r.num_leases for cid, r in self._resident.items() if r.num_leases}
        assert held == {cid: n for cid, n in leases.items() if n}, f"{held} != {leases}"
        for resident in self._resident.values():
            expected = self._pool.pages_for_elements(resident.layout.num_elements)
            assert len(resident.page_ids) == expected, f"{resident.cid} has pages of a wrong size"

    def _load(self, cid: str) -> ResidentAdapter | None:
        num_pages = self.num_pages(cid)
        if not self.make_room(num_pages):
            return None
        image = self._images.load(cid)
        page_ids = self._pages.allocate(_owner(cid), num_pages)
        assert page_ids is not None
        self._pool.write(page_ids, image.buffer)
        resident = ResidentAdapter(cid=cid, layout=image.layout, page_ids=page_ids)
        self._resident[cid] = resident
        self.num_loads += 1
        return resident


def _owner(cid: str) -> Owner:
    return ("adapter", cid)
