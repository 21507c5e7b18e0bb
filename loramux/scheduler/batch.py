"""The running sequences and what they hold: slots, pages, adapter leases, prefix leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as TokenIds
from typing import Protocol

from loramux.config.engine import SchedulerConfig
from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.prefix import PrefixKey, PrefixLease
from loramux.scheduler.sequence import Sequence
from loramux.types.request import Request


class AdapterGate(Protocol):
    """The scheduler's view of the adapters; it does not know in which tier they are."""

    def num_pages(self, cid: str) -> int:
        """Raise AdapterNotFound."""
        ...

    def add_waiters(self, cids: Iterable[str]) -> None:
        """Add a waiter to each and starts their loads; each needs one remove_waiters()."""
        ...

    def remove_waiters(self, cids: Iterable[str]) -> None: ...

    def is_ready(self, cids: Iterable[str]) -> bool:
        """Return whether all are on the device; raise the error of a load that failed."""
        ...

    def acquire(self, cids: Iterable[str]) -> bool:
        """Leases all of them; returns False, without a lease, if one is not on the device."""
        ...

    def release(self, cids: Iterable[str]) -> None: ...

    def missing_pages(self, cids: Iterable[str]) -> int:
        """Return the number of pages that the adapters need and do not own yet."""
        ...

    def prioritize(self, cids: Iterable[str]) -> None:
        """Move these adapters before all others that wait for pages."""
        ...

    @property
    def is_loading(self) -> bool:
        """Returns whether a load is in flight; its pages cannot be reclaimed until it ends."""
        ...


class PageReclaimer(Protocol):
    """Frees pages by evicting idle adapters and cached prefixes."""

    def reclaim(self, num_pages: int) -> bool:
        """Evicts until so many are free; returns False, with no eviction, if that cannot be."""
        ...

    @property
    def num_available(self) -> int:
        """Returns the number of pages that are free or could be freed by evictions."""
        ...


class PrefixGate(Protocol):
    """The scheduler's view of the prefix cache."""

    def acquire(self, key: PrefixKey, token_ids: TokenIds[int], start: int = 0) -> PrefixLease: ...

    def peek(self, key: PrefixKey, token_ids: TokenIds[int], start: int = 0) -> int: ...

    def commit(
        self, lease: PrefixLease, token_ids: TokenIds[int], page_ids: TokenIds[int], owner: Owner
    ) -> list[int]: ...

    def release(self, lease: PrefixLease) -> None: ...


class Batch:
    """The running sequences; each has a slot, adapter leases, and pages for its planned tokens."""

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
        self.sequences: dict[int, Sequence] = {}
        """By sequence id."""
        # R17: those that have not shared what precedes their adapter's start yet.
        self._in_context: dict[int, Sequence] = {}
        self._users: Counter[str] = Counter()
        # At most one sequence per token of a step, so that each can decode in every step.
        self.num_slots = min(config.max_sequences, config.max_batch_tokens)

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.sequences

    @property
    def has_slot(self) -> bool:
        return len(self.sequences) < self.num_slots

    @property
    def num_adapters(self) -> int:
        """Returns the number of distinct adapters in the batch."""
        return len(self._users)

    def runs_all(self, cids: Iterable[str]) -> bool:
        """Return whether all of these adapters are in the batch."""
        return self.first_missing(cids) is None

    def first_missing(self, cids: Iterable[str]) -> str | None:
        """Return the first of these adapters that is not in the batch."""
        for cid in cids:
            if cid not in self._users:
                return cid
        return None

    def fits_adapter_limit(self, cids: Iterable[str], *, without: Iterable[str] = ()) -> bool:
        """R9: returns whether the batch with these adapters, less `without`, is in max_loras."""
        limit = self._config.max_loras
        return limit is None or len((self._users.keys() - set(without)) | set(cids)) <= limit

    def could_admit(self, sequence: Sequence, victims: list[Sequence]) -> bool:
        """Return whether the sequence might fit without the victims.

        It is an upper bound: pages that victims share with others stay in use.
        """
        gone = self._unused_without(victims)
        if not self.fits_adapter_limit(sequence.cids, without=gone):
            return False
        needed = self.pages_for(sequence.num_tokens) - self._num_cached_pages(sequence)
        return needed <= self.pages_without(victims)

    def is_computing_for(self, sequence: Sequence) -> bool:
        """R17: returns whether a running sequence computes the next block that it would share."""
        if not sequence.adapter_start or self._prefixes is None or sequence.needs_all_tokens:
            return False
        salt, stop, prompt = _salt(sequence.request), 0, sequence.prompt_token_ids
        for other in self._in_context.values():
            stop = stop or (self._num_cached_pages(sequence) + 1) * self._config.block_tokens
            is_before = stop <= min(sequence.adapter_start, other.adapter_start)
            is_same = is_before and prompt[:stop] == other.prompt_token_ids[:stop]
            if is_same and salt == _salt(other.request):
                return True
        return False

    def pages_without(self, victims: list[Sequence]) -> int:
        """Return an upper bound of the pages available without the victims."""
        held = sum(len(victim.page_ids) for victim in victims)
        adapters = sum(self._adapters.num_pages(cid) for cid in self._unused_without(victims))
        return self._reclaimer.num_available + held + adapters

    def admit(self, sequence: Sequence, *, num_reserved: int) -> bool:
        """Start a sequence, leaving num_reserved pages; return False if it does not fit."""
        if not self.has_slot or not self.fits_adapter_limit(sequence.cids):
            return False
        if not self._adapters.acquire(sequence.cids):
            return False
        if not self._take_prompt_pages(sequence, num_reserved):
            self._adapters.release(sequence.cids)
            return False
        self.sequences[sequence.sequence_id] = sequence
        if sequence.num_computed < sequence.adapter_start:
            self._in_context[sequence.sequence_id] = sequence
        self._users.update(sequence.cids)
        return True

    def grow(self, sequence: Sequence, num_tokens: int, *, num_reserved: int) -> bool:
        """Allocates pages for so many tokens in all; returns False if there are too few."""
        num_missing = self.pages_for(num_tokens) - len(sequence.page_ids)
        if num_missing <= 0:
            return True
        if not self._reclaimer.reclaim(num_missing + num_reserved):
            return False
        page_ids = self._pages.allocate(sequence.owner, num_missing)
        assert page_ids is not None
        sequence.page_ids += page_ids
        return True

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Frees the pages after so many tokens."""
        needed = self.pages_for(num_tokens)
        if len(sequence.page_ids) > needed:
            self._pages.release(sequence.owner, sequence.page_ids[needed:])
            del sequence.page_ids[needed:]

    def share(self, sequence: Sequence) -> None:
        """Commit the whole blocks that the sequence has computed to the prefix cache."""
        if sequence.num_computed >= sequence.adapter_start:
            self._in_context.pop(sequence.sequence_id, None)
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
        """Frees what a sequence holds; its computed blocks stay in the prefix cache."""
        self.share(sequence)
        del self.sequences[sequence.sequence_id]
        self._in_context.pop(sequence.sequence_id, None)
        self._free_pages(sequence)
        self._adapters.release(sequence.cids)
        self._users -= Counter(sequence.cids)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_tokens)

    def claims(self) -> dict[Owner, list[int]]:
        """Return the unshared pages of each sequence."""
        own = {sequence.owner: sequence.page_ids[sequence.num_shared_pages :] for sequence in self}
        return {owner: page_ids for owner, page_ids in own.items() if page_ids}

    def leases(self) -> Counter[str]:
        """Return the number of running sequences by CID."""
        return self._users.copy()

    def prefix_leases(self) -> list[PrefixLease]:
        return [sequence.lease for sequence in self if sequence.lease is not None]

    def check_integrity(self) -> None:
        users = Counter(cid for sequence in self for cid in sequence.cids)
        assert users == self._users, f"{users} != {self._users}"
        assert self.fits_adapter_limit(()), "more adapters than allowed"
        assert len(self) <= self.num_slots, "more sequences than allowed"
        for sequence in self:
            held = len(sequence.page_ids) * self._config.block_tokens
            assert sequence.num_computed <= held, "computed tokens without a page"
            known = sequence.num_tokens - sequence.has_unknown
            assert sequence.num_computed <= known, "a token counts as computed before it is known"
            needed = self.pages_for(sequence.num_tokens + sequence.num_drafts)
            assert len(sequence.page_ids) <= needed, "pages without tokens"
            assert sequence.started_s is not None
            shared = [] if sequence.lease is None else sequence.lease.page_ids
            assert sequence.page_ids[: len(shared)] == shared, "shared pages are not the first"
        assert self._in_context.keys() <= self.sequences.keys(), "an ended one is waited for"

    def _take_prompt_pages(self, sequence: Sequence, num_reserved: int) -> bool:
        needed = self.pages_for(sequence.num_tokens) - self._num_cached_pages(sequence)
        num_spare = self._reclaimer.num_available - num_reserved - needed
        refused = sequence.num_spare_refused
        # An attempt counts in the prefix cache's hit rate: retry only with more spare pages.
        if num_spare < 0 or (self.sequences and refused is not None and num_spare <= refused):
            return False
        if self._prefixes is not None:
            key, token_ids = self._prefix_key(sequence), sequence.reusable_token_ids()
            sequence.lease = self._prefixes.acquire(key, token_ids, sequence.adapter_start)
            sequence.page_ids = list(sequence.lease.page_ids)
        # The cached pages may have been counted as available before they were locked.
        if not self.grow(sequence, sequence.num_tokens, num_reserved=num_reserved):
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
        num_cached = self._prefixes.peek(key, token_ids, sequence.adapter_start)
        return num_cached // self._config.block_tokens

    def _prefix_key(self, sequence: Sequence) -> PrefixKey:
        request = sequence.request
        return self._config.base_digest, request.selection, _salt(request)

    def _unused_without(self, victims: list[Sequence]) -> set[str]:
        gone = Counter(cid for victim in victims for cid in victim.cids)
        return {cid for cid, number in gone.items() if number == self._users[cid]}


def _salt(request: Request) -> str:
    # The length prevents a tenant name and salt that collide with another tenant's.
    return f"{len(request.tenant)}:{request.tenant}{request.cache_salt}"
