"""The sequences that run, and all that they hold: places, pages, adapters, shared prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as TokenIds
from typing import Protocol

from loramux.config.engine import SchedulerConfig
from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.prefix import PrefixKey, PrefixLease
from loramux.scheduler.sequence import Sequence


class AdapterGate(Protocol):
    """What the scheduler needs to know of adapters; it never sees where their bytes are."""

    def num_pages(self, cid: str) -> int:
        """Raises AdapterNotFound."""
        ...

    def add_waiters(self, cids: Iterable[str]) -> None:
        """Somebody waits for them: they start to move to the device. Each needs one unwant."""
        ...

    def remove_waiters(self, cids: Iterable[str]) -> None: ...

    def is_ready(self, cids: Iterable[str]) -> bool:
        """All are in pages. Raises the load's error if one failed since it was wanted."""
        ...

    def acquire(self, cids: Iterable[str]) -> bool:
        """Leases all and loads none; False: one is not ready, and nothing was leased."""
        ...

    def release(self, cids: Iterable[str]) -> None: ...

    def missing_pages(self, cids: Iterable[str]) -> int:
        """Pages that must still be found before all could be on the device."""
        ...

    def prioritize(self, cids: Iterable[str]) -> None:
        """Room was made for these: they come before all others that wait for pages."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether any load is under way; until it ends, its pages cannot be had."""
        ...


class PageReclaimer(Protocol):
    def reclaim(self, num_pages: int) -> bool:
        """Evicts until so many are free; False: cannot, and nothing was evicted."""
        ...

    @property
    def num_available(self) -> int: ...


class PrefixGate(Protocol):
    def acquire(self, key: PrefixKey, token_ids: TokenIds[int]) -> PrefixLease: ...

    def peek(self, key: PrefixKey, token_ids: TokenIds[int]) -> int: ...

    def commit(
        self, lease: PrefixLease, token_ids: TokenIds[int], page_ids: TokenIds[int], owner: Owner
    ) -> list[int]: ...

    def release(self, lease: PrefixLease) -> None: ...


class Batch:
    """A running sequence has a place, leased adapters, and pages for all it has been promised."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        pages: PageAllocator,
        reclaimer: PageReclaimer,
        adapters: AdapterGate,
        prefixes: PrefixGate | None,
    ) -> None:
        self._config = config
        self._pages = pages
        self._reclaimer = reclaimer
        self._adapters = adapters
        self._prefixes = prefixes
        self._running: dict[int, Sequence] = {}
        self._users: Counter[str] = Counter()
        # With a row for each, every running sequence goes on in every step.
        self._num_places = min(config.max_sequences, config.max_batch_tokens)

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._running.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._running

    @property
    def has_place(self) -> bool:
        return len(self._running) < self._num_places

    @property
    def num_adapters(self) -> int:
        """Distinct ones that run."""
        return len(self._users)

    def uses(self, cids: Iterable[str]) -> bool:
        """Whether all of them run already."""
        return self.lacking(cids) is None

    def lacking(self, cids: Iterable[str]) -> str | None:
        """The first of them that does not run."""
        for cid in cids:
            if cid not in self._users:
                return cid
        return None

    def has_place_for_adapters(self, cids: Iterable[str], *, without: Iterable[str] = ()) -> bool:
        """Within max_loras; `without`: adapters that would no longer be used."""
        limit = self._config.max_loras
        return limit is None or len((self._users.keys() - set(without)) | set(cids)) <= limit

    def could_admit(self, sequence: Sequence, victims: list[Sequence]) -> bool:
        """Whether there might be room if these were gone; what they share may stay in use."""
        gone = self._unused_without(victims)
        if not self.has_place_for_adapters(sequence.cids, without=gone):
            return False
        needed = self.pages_for(sequence.num_tokens) - self._num_cached_pages(sequence)
        return needed <= self.pages_without(victims)

    def pages_without(self, victims: list[Sequence]) -> int:
        """Pages that might be had if these were gone."""
        held = sum(len(victim.page_ids) for victim in victims)
        adapters = sum(self._adapters.num_pages(cid) for cid in self._unused_without(victims))
        return self._reclaimer.num_available + held + adapters

    def admit(self, sequence: Sequence, *, num_held: int) -> bool:
        """Takes all that it needs and leaves num_held pages; False: nothing was taken."""
        if not self.has_place or not self.has_place_for_adapters(sequence.cids):
            return False
        if not self._adapters.acquire(sequence.cids):
            return False
        if not self._take_prompt_pages(sequence, num_held):
            self._adapters.release(sequence.cids)
            return False
        self._running[sequence.sequence_id] = sequence
        self._users.update(sequence.cids)
        return True

    def grow(self, sequence: Sequence, num_tokens: int, *, num_held: int) -> bool:
        """Pages for so many tokens in all; False: there are none, and nothing was taken."""
        num_missing = self.pages_for(num_tokens) - len(sequence.page_ids)
        if num_missing <= 0:
            return True
        if not self._reclaimer.reclaim(num_missing + num_held):
            return False
        page_ids = self._pages.allocate(sequence.owner, num_missing)
        assert page_ids is not None
        sequence.page_ids += page_ids
        return True

    def share(self, sequence: Sequence) -> None:
        """Lets others use the whole blocks that it has computed."""
        if self._prefixes is None or sequence.lease is None:
            return
        if sequence.num_computed // self._config.block_tokens > sequence.num_shared_pages:
            sequence.page_ids = self._prefixes.commit(
                sequence.lease,
                sequence.tokens(0, sequence.num_computed),
                sequence.page_ids,
                sequence.owner,
            )

    def remove(self, sequence: Sequence) -> None:
        """Gives everything back; what it has computed stays in the cache as long as it may."""
        self.share(sequence)
        del self._running[sequence.sequence_id]
        self._free_pages(sequence)
        self._adapters.release(sequence.cids)
        self._users -= Counter(sequence.cids)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_tokens)

    def claims(self) -> dict[Owner, list[int]]:
        """The pages of each sequence that are not shared."""
        own = {sequence.owner: sequence.page_ids[sequence.num_shared_pages :] for sequence in self}
        return {owner: page_ids for owner, page_ids in own.items() if page_ids}

    def leases(self) -> Counter[str]:
        """CID -> sequences that use it."""
        return self._users.copy()

    def prefix_leases(self) -> list[PrefixLease]:
        return [sequence.lease for sequence in self if sequence.lease is not None]

    def check_integrity(self) -> None:
        users = Counter(cid for sequence in self for cid in sequence.cids)
        assert users == self._users, f"{users} != {self._users}"
        assert self.has_place_for_adapters(()), "more adapters than allowed"
        assert len(self) <= self._num_places, "more sequences than allowed"
        for sequence in self:
            held = len(sequence.page_ids) * self._config.block_tokens
            assert sequence.num_computed <= held, "computed tokens without a page"
            assert sequence.started_s is not None
            shared = [] if sequence.lease is None else sequence.lease.page_ids
            assert sequence.page_ids[: len(shared)] == shared, "shared pages are not the first"

    def _take_prompt_pages(self, sequence: Sequence, num_held: int) -> bool:
        needed = self.pages_for(sequence.num_tokens) - self._num_cached_pages(sequence)
        num_spare = self._reclaimer.num_available - num_held - needed
        refused = sequence.num_spare_refused
        # An attempt counts in the prefix cache's figures: try again only when it may go better.
        if num_spare < 0 or (self._running and refused is not None and num_spare <= refused):
            return False
        if self._prefixes is not None:
            key, token_ids = self._prefix_key(sequence), sequence.reusable_token_ids()
            sequence.lease = self._prefixes.acquire(key, token_ids)
            sequence.page_ids = list(sequence.lease.page_ids)
        # The cached pages may have been among those available, and are not any more.
        if not self.grow(sequence, sequence.num_tokens, num_held=num_held):
            self._free_pages(sequence)
            sequence.num_spare_refused = num_spare
            return False
        sequence.num_computed = sequence.num_shared_pages * self._config.block_tokens
        return True

    def _free_pages(self, sequence: Sequence) -> None:
        self._pages.release(sequence.owner, sequence.page_ids[sequence.num_shared_pages :])
        if self._prefixes is not None and sequence.lease is not None:
            self._prefixes.release(sequence.lease)
        sequence.page_ids = []
        sequence.lease = None

    def _num_cached_pages(self, sequence: Sequence) -> int:
        if self._prefixes is None:
            return 0
        key, token_ids = self._prefix_key(sequence), sequence.reusable_token_ids()
        return self._prefixes.peek(key, token_ids) // self._config.block_tokens

    def _prefix_key(self, sequence: Sequence) -> PrefixKey:
        request = sequence.request
        # The length keeps a tenant from naming himself into another's cache.
        salt = f"{len(request.tenant)}:{request.tenant}{request.cache_salt}"
        return self._config.base_digest, request.selection, salt

    def _unused_without(self, victims: list[Sequence]) -> set[str]:
        gone = Counter(cid for victim in victims for cid in victim.cids)
        return {cid for cid, number in gone.items() if number == self._users[cid]}
