"""Tracks the owner of each page of the pool, by page number; the bytes are in memory.pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

# ("kv", sequence id), ("prefix", node id) or ("adapter", CID)
Owner = tuple[str, int | str]
_FREE = ord(".")
_KINDS = {"kv": ord("k"), "prefix": ord("p"), "adapter": ord("a")}


class PageAllocator:
    """Hands out equal pages for KV blocks and adapter weights; each has one owner or is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # KV pages are taken from and returned to the right end, adapter pages the left end: an
        # adapter's pages stay contiguous although KV pages are allocated one by one.
        self._free = deque(range(num_pages))
        self._owners: dict[int, Owner] = {}
        self._kinds = bytearray([_FREE]) * num_pages
        self._num_launched_steps = 0
        self._num_finished_steps = 0
        # Page -> number of steps launched before its release; these steps may still access it.
        self._released_at: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def kinds(self) -> bytes:
        """Return a letter for each page: k (KV), p (prefix), a (adapter) or "." (free)."""
        return bytes(self._kinds)

    def step_launched(self) -> None:
        """Record that a step was launched on the device."""
        self._num_launched_steps += 1

    def step_finished(self) -> None:
        """Record that the oldest launched step has finished."""
        self._num_finished_steps += 1

    def allocate(self, owner: Owner, count: int) -> list[int] | None:
        """Return pages for KV blocks in ascending order, or None if too few are free."""
        if count > len(self._free):
            return None
        # Ascending: a copy to contiguous pages is one copy.
        page_ids = sorted(self._free.pop() for _ in range(count))
        self._give(owner, page_ids)
        return page_ids

    def allocate_for_load(self, owner: Owner, count: int) -> list[int] | None:
        """Return pages for an adapter, preferring those that no in-flight step accesses."""
        if count > len(self._free):
            return None
        page_ids: list[int] = []
        in_use: list[int] = []
        while self._free and len(page_ids) < count:
            page_id = self._free.popleft()
            (page_ids if self.is_quiescent([page_id]) else in_use).append(page_id)
        num_missing = count - len(page_ids)
        page_ids += in_use[:num_missing]
        self._free.extendleft(reversed(in_use[num_missing:]))
        self._give(owner, page_ids)
        return sorted(page_ids)

    def is_quiescent(self, page_ids: Iterable[int]) -> bool:
        """Return whether no in-flight step accesses any of the pages for an earlier owner."""
        released_at = self._released_at
        return all(released_at.get(page_id, 0) <= self._num_finished_steps for page_id in page_ids)

    def release(self, owner: Owner, page_ids: Iterable[int]) -> None:
        put_back = self._free.appendleft if owner[0] == "adapter" else self._free.append
        for page_id in page_ids:
            self._check_owner(page_id, owner)
            del self._owners[page_id]
            self._kinds[page_id] = _FREE
            put_back(page_id)
            self._released_at[page_id] = self._num_launched_steps

    def transfer(self, page_ids: Iterable[int], owner: Owner, new_owner: Owner) -> None:
        kind = _KINDS[new_owner[0]]
        for page_id in page_ids:
            self._check_owner(page_id, owner)
            self._owners[page_id] = new_owner
            self._kinds[page_id] = kind

    def check_integrity(self, claims: Mapping[Owner, Iterable[int]]) -> None:
        """Assert that every page is free or claimed exactly once, by its recorded owner."""
        claimed: dict[int, Owner] = {}
        for owner, page_ids in claims.items():
            for page_id in page_ids:
                assert page_id not in claimed, f"page {page_id}: {owner} and {claimed[page_id]}"
                claimed[page_id] = owner
        assert claimed == self._owners, f"claims differ from owners: {claimed} {self._owners}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & claimed.keys(), "a page is free and owned"
        assert len(free) + len(claimed) == self.num_pages, "a page is lost"
        expected = bytearray([_FREE]) * self.num_pages
        for page_id, owner in claimed.items():
            expected[page_id] = _KINDS[owner[0]]
        assert expected == self._kinds, "the kind of a page is not that of its owner"

    def _give(self, owner: Owner, page_ids: list[int]) -> None:
        self._owners.update(dict.fromkeys(page_ids, owner))
        kind = _KINDS[owner[0]]
        for page_id in page_ids:
            self._kinds[page_id] = kind

    def _check_owner(self, page_id: int, owner: Owner) -> None:
        if self._owners.get(page_id) != owner:
            raise AssertionError(
                f"page {page_id} belongs to {self._owners.get(page_id)}, not to {owner}"
            )
