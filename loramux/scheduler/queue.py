"""Sequences that wait for a place, by tenant and adapter, and in which order they get one."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter

from loramux.scheduler.fairness import Standing
from loramux.scheduler.sequence import Sequence
from loramux.types.request import Selection

Rank = tuple[float, ...]
_arrival = attrgetter("sequence_id")
_adapter_counter = attrgetter("standing.adapter.counter")
_tenant_counter = attrgetter("standing.tenant.counter")


def fair_rank(sequence: Sequence) -> Rank:
    """Who has had least comes first: the tenant, then the adapter; among equals the oldest."""
    standing = sequence.standing
    return standing.tenant.counter, standing.adapter.counter, sequence.sequence_id


def arrival_rank(sequence: Sequence) -> Rank:
    return (sequence.sequence_id,)


class Lane:
    """What waits of one tenant for one selection, in order of arrival."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence:
        return self._sequences[0]

    @property
    def standing(self) -> Standing:
        return self._sequences[0].standing

    def add(self, sequence: Sequence) -> None:
        """New ones come last, preempted ones to their old place."""
        insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.sequence_id, key=_arrival)
        assert self._sequences[index] is sequence
        del self._sequences[index]


class WaitingQueue:
    def __init__(self, *, is_fair: bool) -> None:
        self._is_fair = is_fair
        self.rank: Callable[[Sequence], Rank] = fair_rank if is_fair else arrival_rank
        self._lanes: dict[tuple[str, Selection], Lane] = {}
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for lane in self._lanes.values() for sequence in lane)

    def lanes(self) -> Iterable[Lane]:
        return self._lanes.values()

    def in_order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """By rank. Stable sorts of plain numbers: much faster than one by ranks."""
        order = sorted(sequences, key=_arrival)
        if self._is_fair:
            order.sort(key=_adapter_counter)
            order.sort(key=_tenant_counter)
        return order

    def add(self, sequence: Sequence) -> None:
        self._lanes.setdefault(_key(sequence), Lane()).add(sequence)
        self._num_sequences += 1

    def remove(self, sequence: Sequence) -> None:
        lane = self._lanes[_key(sequence)]
        lane.remove(sequence)
        self._num_sequences -= 1
        if not lane:
            del self._lanes[_key(sequence)]

    def some_lanes(self, count: int) -> list[Lane]:
        """The next few in turn, so that each is looked at every now and then."""
        keys = list(islice(self._lanes, count))
        for key in keys:
            self._lanes[key] = self._lanes.pop(key)
        return [self._lanes[key] for key in keys]

    def check_integrity(self) -> None:
        assert self._num_sequences == sum(map(len, self._lanes.values()))
        for key, lane in self._lanes.items():
            ids = [sequence.sequence_id for sequence in lane]
            assert ids and ids == sorted(ids), f"the lane of {key} is empty or out of order"
            assert all(_key(sequence) == key for sequence in lane), "a sequence in a wrong lane"


class Candidates:
    """One pass over lanes in order of their heads. While it lasts, ranks may only grow."""

    def __init__(self, lanes: Iterable[Lane], rank: Callable[[Sequence], Rank]) -> None:
        self._rank = rank
        self._heap = [(rank(lane.head), lane) for lane in lanes]
        heapq.heapify(self._heap)

    def pop(self) -> Lane | None:
        while self._heap:
            rank, lane = heapq.heappop(self._heap)
            if not lane:
                continue
            if self._rank(lane.head) == rank:
                return lane
            self.push(lane)
        return None

    def comes_before(self, other: Candidates) -> bool:
        return bool(self._heap) and (not other._heap or self._heap[0] < other._heap[0])

    def push(self, lane: Lane) -> None:
        if lane:
            heapq.heappush(self._heap, (self._rank(lane.head), lane))


def _key(sequence: Sequence) -> tuple[str, Selection]:
    return sequence.request.tenant, sequence.request.selection
