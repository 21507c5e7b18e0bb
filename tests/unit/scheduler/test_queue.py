from __future__ import annotations

import random

import pytest

from loramux.scheduler.fairness import FairShares
from loramux.scheduler.queue import Candidates, WaitingQueues
from loramux.scheduler.sequence import Sequence
from tests.unit.scheduler.scheduler_factory import make_request


class Maker:
    def __init__(self) -> None:
        self.shares = FairShares()
        self.count = 0

    def __call__(self, tenant: str, cid: str | None = None) -> Sequence:
        request = make_request(str(self.count), 3, tenant=tenant, cid=cid)
        clients = self.shares.arrive(request)
        self.count += 1
        return Sequence(self.count, request, 0, max_length=64, clients=clients, now=0.0)


def popped(candidates: Candidates) -> list[int]:
    found = []
    while (queue := candidates.pop()) is not None:
        found.append(queue.head.sequence_id)
    return found


def test_r4_order_is_by_tenant_counter_then_adapter_counter() -> None:
    make = Maker()
    waiting = WaitingQueues(is_fair=True)
    sequences = [make("a", "x"), make("a", "y"), make("b", "x"), make("a", "x")]
    for sequence in sequences:
        waiting.add(sequence)
    sequences[0].clients.charge(10.0)
    sequences[2].clients.charge(50.0)
    assert popped(Candidates(waiting.queues(), waiting.rank)) == [2, 1, 3]


def test_r4_fcfs_order_is_by_the_arrival_of_the_heads() -> None:
    make = Maker()
    waiting = WaitingQueues(is_fair=False)
    sequences = [make("a", "x"), make("b"), make("a", "y")]
    for sequence in reversed(sequences):
        sequence.clients.charge(100.0 / sequence.sequence_id)
        waiting.add(sequence)
    assert popped(Candidates(waiting.queues(), waiting.rank)) == [1, 2, 3]


def test_r1_a_preempted_sequence_returns_to_its_position() -> None:
    make = Maker()
    waiting = WaitingQueues(is_fair=True)
    first, second, third = make("a"), make("a"), make("a")
    waiting.add(third)
    waiting.add(first)
    waiting.add(second)
    assert [s.sequence_id for s in waiting] == [1, 2, 3]
    waiting.remove(second)
    waiting.check_integrity()
    assert len(waiting) == 2


def test_r4_a_charge_during_a_pass_moves_a_queue_back() -> None:
    """Catches a tenant that gets all free slots of a step by its old counter."""
    make = Maker()
    waiting = WaitingQueues(is_fair=True)
    sequences = [make("a"), make("b")]
    for sequence in sequences:
        waiting.add(sequence)
    candidates = Candidates(waiting.queues(), waiting.rank)
    sequences[0].clients.charge(5.0)
    queue = candidates.pop()
    assert queue is not None and queue.head is sequences[1]
    queue = candidates.pop()
    assert queue is not None and queue.head is sequences[0]


def test_r1_an_empty_queue_is_skipped() -> None:
    make = Maker()
    waiting = WaitingQueues(is_fair=True)
    sequence = make("a")
    waiting.add(sequence)
    candidates = Candidates(waiting.queues(), waiting.rank)
    waiting.remove(sequence)
    assert candidates.pop() is None


def test_r5_failed_loads_are_polled_round_robin() -> None:
    make = Maker()
    waiting = WaitingQueues(is_fair=True)
    for number in range(5):
        waiting.add(make("a", f"x{number}"))
    seen = [queue.head.sequence_id for _ in range(3) for queue in waiting.next_queues(2)]
    assert set(seen) == {1, 2, 3, 4, 5}
    assert len(waiting.next_queues(99)) == 5


def test_r4_two_passes_can_be_merged() -> None:
    make = Maker()
    waiting = WaitingQueues(is_fair=False)
    for number in range(4):
        waiting.add(make("a", f"x{number}"))
    queues = list(waiting.queues())
    odd, even = Candidates(queues[::2], waiting.rank), Candidates(queues[1::2], waiting.rank)
    seen = []
    while (queue := (odd if odd.comes_before(even) else even).pop()) is not None:
        seen.append(queue.head.sequence_id)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("is_fair", [True, False])
def test_r4_sequences_are_sorted_by_rank(is_fair: bool) -> None:
    """Catches stable sorts in the wrong order, and equal counters without order of arrival."""
    source = random.Random(3)
    make = Maker()
    waiting = WaitingQueues(is_fair=is_fair)
    sequences = [make(source.choice("abc"), source.choice("xyz")) for _ in range(60)]
    for sequence in sequences:
        sequence.clients.charge(source.choice([0.0, 1.0, 2.0]))
    source.shuffle(sequences)
    assert waiting.in_order(sequences) == sorted(sequences, key=waiting.rank)
