from __future__ import annotations

import random

import pytest

from loramux.scheduler.fairness import FairShares
from loramux.scheduler.queue import Candidates, WaitingQueue
from loramux.scheduler.sequence import Sequence
from tests.unit.scheduler.scheduler_factory import make_request


class Maker:
    def __init__(self) -> None:
        self.shares = FairShares()
        self.count = 0

    def __call__(self, tenant: str, cid: str | None = None) -> Sequence:
        request = make_request(str(self.count), 3, tenant=tenant, cid=cid)
        standing = self.shares.arrive(request)
        self.count += 1
        return Sequence(self.count, request, 0, max_length=64, standing=standing, now=0.0)


def popped(candidates: Candidates) -> list[int]:
    found = []
    while (lane := candidates.pop()) is not None:
        found.append(lane.head.sequence_id)
    return found


def test_the_least_served_tenant_and_in_it_the_least_served_adapter_come_first() -> None:
    make = Maker()
    queue = WaitingQueue(is_fair=True)
    sequences = [make("a", "x"), make("a", "y"), make("b", "x"), make("a", "x")]
    for sequence in sequences:
        queue.add(sequence)
    sequences[0].standing.charge(10.0)
    sequences[2].standing.charge(50.0)
    assert popped(Candidates(queue.lanes(), queue.rank)) == [2, 1, 3]


def test_by_arrival_the_oldest_head_comes_first() -> None:
    make = Maker()
    queue = WaitingQueue(is_fair=False)
    sequences = [make("a", "x"), make("b"), make("a", "y")]
    for sequence in reversed(sequences):
        sequence.standing.charge(100.0 / sequence.sequence_id)
        queue.add(sequence)
    assert popped(Candidates(queue.lanes(), queue.rank)) == [1, 2, 3]


def test_a_preempted_sequence_gets_its_old_place_in_the_lane() -> None:
    make = Maker()
    queue = WaitingQueue(is_fair=True)
    first, second, third = make("a"), make("a"), make("a")
    queue.add(third)
    queue.add(first)
    queue.add(second)
    assert [s.sequence_id for s in queue] == [1, 2, 3]
    queue.remove(second)
    queue.check_integrity()
    assert len(queue) == 2


def test_a_charge_in_the_middle_of_a_pass_moves_a_lane_back() -> None:
    """Catches a tenant who takes all free places of a step with the counter it had before."""
    make = Maker()
    queue = WaitingQueue(is_fair=True)
    sequences = [make("a"), make("b")]
    for sequence in sequences:
        queue.add(sequence)
    candidates = Candidates(queue.lanes(), queue.rank)
    sequences[0].standing.charge(5.0)
    lane = candidates.pop()
    assert lane is not None and lane.head is sequences[1]
    lane = candidates.pop()
    assert lane is not None and lane.head is sequences[0]


def test_a_lane_that_was_emptied_is_skipped() -> None:
    make = Maker()
    queue = WaitingQueue(is_fair=True)
    sequence = make("a")
    queue.add(sequence)
    candidates = Candidates(queue.lanes(), queue.rank)
    queue.remove(sequence)
    assert candidates.pop() is None


def test_every_lane_has_its_turn_to_be_looked_at() -> None:
    make = Maker()
    queue = WaitingQueue(is_fair=True)
    for number in range(5):
        queue.add(make("a", f"x{number}"))
    seen = [lane.head.sequence_id for _ in range(3) for lane in queue.some_lanes(2)]
    assert set(seen) == {1, 2, 3, 4, 5}
    assert len(queue.some_lanes(99)) == 5


def test_two_passes_can_be_walked_as_one() -> None:
    make = Maker()
    queue = WaitingQueue(is_fair=False)
    for number in range(4):
        queue.add(make("a", f"x{number}"))
    lanes = list(queue.lanes())
    odd, even = Candidates(lanes[::2], queue.rank), Candidates(lanes[1::2], queue.rank)
    seen = []
    while (lane := (odd if odd.comes_before(even) else even).pop()) is not None:
        seen.append(lane.head.sequence_id)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("is_fair", [True, False])
def test_sequences_are_put_in_order_of_their_ranks(is_fair: bool) -> None:
    """Catches stable sorts in the wrong sequence, and equal counters that forget who came first."""
    source = random.Random(3)
    make = Maker()
    queue = WaitingQueue(is_fair=is_fair)
    sequences = [make(source.choice("abc"), source.choice("xyz")) for _ in range(60)]
    for sequence in sequences:
        sequence.standing.charge(source.choice([0.0, 1.0, 2.0]))
    source.shuffle(sequences)
    assert queue.in_order(sequences) == sorted(sequences, key=queue.rank)
