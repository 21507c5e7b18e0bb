"""Who owns which page of the pool. Numbers only: the bytes are in memory.pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

# ("kv", sequence id), ("prefix", node id) or ("adapter", CID)
Owner = tuple[str, int | str]


class PageAllocator:
    """Equal pages for KV blocks and adapter weights alike; each has one owner or is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Blocks of the KV cache come from one end and go back there, adapters from the other: an
        # adapter's pages stay neighbours, while blocks are taken one by one.
        self._free = deque(range(num_pages))
        self._owners: dict[int, Owner] = {}
        self.num_launched = 0
        """Steps that the device was given."""
        self.num_landed = 0
        """Those of them that it has finished."""
        # How many steps had been launched when a page was released: they may still use it.
        self._released_at: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, owner: Owner, count: int) -> list[int] | None:
        """None: too few free pages, and nothing was taken."""
        if count > len(self._free):
            return None
        # In order: what is copied to neighbouring pages is one copy.
        page_ids = sorted(self._free.pop() for _ in range(count))
        self._owners.update(dict.fromkeys(page_ids, owner))
        return page_ids

    def allocate_settled(self, owner: Owner, count: int) -> list[int] | None:
        """As allocate, from the other end, and pages that no step in flight uses come first."""
        if count > len(self._free):
            return None
        page_ids: list[int] = []
        in_use: list[int] = []
        while self._free and len(page_ids) < count:
            page_id = self._free.popleft()
            (page_ids if self.is_settled([page_id]) else in_use).append(page_id)
        num_missing = count - len(page_ids)
        page_ids += in_use[:num_missing]
        self._free.extendleft(reversed(in_use[num_missing:]))
        self._owners.update(dict.fromkeys(page_ids, owner))
        return sorted(page_ids)

    def is_settled(self, page_ids: Iterable[int]) -> bool:
        """No step in flight uses any of them."""
        released_at = self._released_at
        return all(released_at.get(page_id, 0) <= self.num_landed for page_id in page_ids)

    def release(self, owner: Owner, page_ids: Iterable[int]) -> None:
        give_back = self._free.appendleft if owner[0] == "adapter" else self._free.append
        for page_id in page_ids:
            self._check_owner(page_id, owner)
            del self._owners[page_id]
            give_back(page_id)
            self._released_at[page_id] = self.num_launched

    def transfer(self, page_ids: Iterable[int], owner: Owner, new_owner: Owner) -> None:
        for page_id in page_ids:
            self._check_owner(page_id, owner)
            self._owners[page_id] = new_owner

    def check_integrity(self, claims: Mapping[Owner, Iterable[int]]) -> None:
        """Every page is free or claimed, exactly once, by the owner that we have on record."""
        claimed: dict[int, Owner] = {}
        for owner, page_ids in claims.items():
            for page_id in page_ids:
                assert page_id not in claimed, f"page {page_id}: {owner} and {claimed[page_id]}"
                claimed[page_id] = owner
        assert claimed == self._owners, f"claims differ from records: {claimed} {self._owners}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & claimed.keys(), "a page is free and owned"
        assert len(free) + len(claimed) == self.num_pages, "a page is lost"

    def _check_owner(self, page_id: int, owner: Owner) -> None:
        if self._owners.get(page_id) != owner:
            raise AssertionError(
                f"page {page_id} belongs to {self._owners.get(page_id)}, not to {owner}"
            )
