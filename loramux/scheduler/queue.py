"""Queues of waiting sequences, one per tenant and set of adapters (R1), and their order (R4)."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter

from loramux.scheduler.fairness import Clients
from loramux.scheduler.sequence import Sequence

Rank = tuple[float, ...]
_arrival = attrgetter("sequence_id")
_adapter_counter = attrgetter("clients.adapter.counter")
_tenant_counter = attrgetter("clients.tenant.counter")


def fair_rank(sequence: Sequence) -> Rank:
    """R4: orders by the tenant's counter, then the adapter's counter, then arrival."""
    clients = sequence.clients
    return clients.tenant.counter, clients.adapter.counter, sequence.sequence_id


def arrival_rank(sequence: Sequence) -> Rank:
    """R4 for `fcfs`: orders by arrival alone."""
    return (sequence.sequence_id,)


class AdapterQueue:
    """R1: the waiting sequences of one tenant with one set of adapters, in order of arrival."""

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
    def clients(self) -> Clients:
        return self._sequences[0].clients

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence; put a preempted one back to its old position."""
        insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.sequence_id, key=_arrival)
        assert self._sequences[index] is sequence
        del self._sequences[index]


class WaitingQueues:
    """All waiting sequences, in queues."""

    def __init__(self, *, is_fair: bool) -> None:
        self._is_fair = is_fair
        self.rank: Callable[[Sequence], Rank] = fair_rank if is_fair else arrival_rank
        self._queues: dict[tuple[str, tuple[str, ...]], AdapterQueue] = {}
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def queues(self) -> Iterable[AdapterQueue]:
        return self._queues.values()

    def in_order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Sorts sequences by rank. Stable sorts by one number each are faster than by tuples."""
        order = sorted(sequences, key=_arrival)
        if self._is_fair:
            order.sort(key=_adapter_counter)
            order.sort(key=_tenant_counter)
        return order

    def add(self, sequence: Sequence) -> None:
        self._queues.setdefault(_key(sequence), AdapterQueue()).add(sequence)
        self._num_sequences += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[_key(sequence)]
        queue.remove(sequence)
        self._num_sequences -= 1
        if not queue:
            del self._queues[_key(sequence)]

    def next_queues(self, count: int) -> list[AdapterQueue]:
        """Return the next queues in round-robin order."""
        keys = list(islice(self._queues, count))
        for key in keys:
            self._queues[key] = self._queues.pop(key)
        return [self._queues[key] for key in keys]

    def check_integrity(self) -> None:
        assert self._num_sequences == sum(map(len, self._queues.values()))
        for key, queue in self._queues.items():
            ids = [sequence.sequence_id for sequence in queue]
            assert ids and ids == sorted(ids), f"the queue of {key} is empty or out of order"
            assert all(_key(sequence) == key for sequence in queue), "a sequence in a wrong queue"


class Candidates:
    """One pass over queues in the order of their heads; ranks may only grow meanwhile."""

    def __init__(self, queues: Iterable[AdapterQueue], rank: Callable[[Sequence], Rank]) -> None:
        self._rank = rank
        self._heap = [(rank(queue.head), queue) for queue in queues]
        heapq.heapify(self._heap)

    def pop(self) -> AdapterQueue | None:
        while self._heap:
            rank, queue = heapq.heappop(self._heap)
            if not queue:
                continue
            if self._rank(queue.head) == rank:
                return queue
            self.push(queue)
        return None

    def comes_before(self, other: Candidates) -> bool:
        return bool(self._heap) and (not other._heap or self._heap[0] < other._heap[0])

    def push(self, queue: AdapterQueue) -> None:
        if queue:
            heapq.heappush(self._heap, (self._rank(queue.head), queue))


def _key(sequence: Sequence) -> tuple[str, tuple[str, ...]]:
    return sequence.request.tenant, sequence.cids
