"""Who gets a place in the batch, and who has to give one up."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, auto
from itertools import islice

from loramux.config import SchedulerConfig
from loramux.errors import LoramuxError
from loramux.scheduler.batch import AdapterGate, Batch, PageRoom
from loramux.scheduler.fairness import Debtors
from loramux.scheduler.queue import Candidates, Lane, Rank, WaitingQueue
from loramux.scheduler.sequence import Sequence

# Lanes that are looked at for one whose adapters run already, and for loads that failed.
_NUM_LOOKED_AT = 16
_NUM_POLLED = 32


class _Outcome(Enum):
    ADMITTED = auto()
    PASSED = auto()
    """Others may go first."""
    FAILED = auto()
    BLOCKED = auto()
    """Nobody may go first."""


class Admission:
    """The queue on one side, the batch on the other; Scheduler's docstring has the rules."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        batch: Batch,
        room: PageRoom,
        adapters: AdapterGate,
        fail: Callable[[Sequence, str, str], None],
    ) -> None:
        self._max_wait_s = config.max_wait_s
        self._is_fair = config.schedule == "fair"
        self._batch = batch
        self._room = room
        self._adapters = adapters
        self._fail = fail
        self.waiting = WaitingQueue(is_fair=self._is_fair)
        self.num_loading = 0
        """Sequences that the last pass went past because an adapter was not there yet."""
        self.num_preemptions = 0
        # For whose adapters pages are kept free, how many, and which of them are there already.
        self._holder: Sequence | None = None
        self._num_held = 0
        self._held_cids: list[str] = []
        # Those whose adapters the pass found missing so far.
        self._passed: list[Sequence] = []
        # Owed a place, ready, and without one in this step.
        self._unserved: set[int] = set()

    def num_held_against(self, sequence: Sequence) -> int:
        """Pages that it must leave for somebody who comes first; none if it is alone."""
        holder, rank = self._holder, self.waiting.rank
        is_alone = not any(other is not sequence for other in islice(self._batch, 2))
        if holder is None or is_alone or rank(sequence) <= rank(holder):
            return 0
        return self._num_held

    def held_adapters(self) -> Counter[str]:
        """Leased for a sequence that waits for the rest of its adapters."""
        return Counter(self._held_cids)

    def leave(self, sequence: Sequence) -> None:
        """Out of the queue, for good."""
        self.waiting.remove(sequence)
        self._adapters.unwant(sequence.cids)
        self._let_go()

    def preempt(self, sequence: Sequence, now: float) -> None:
        """It gives everything back and waits again, protected as at its arrival."""
        self._adapters.want(sequence.cids)
        self._batch.remove(sequence)
        sequence.restart(now)
        sequence.standing.stop()
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def begin_step(self, now: float) -> None:
        self._let_go()
        self._end_failed()
        self._serve_overdue(now)

    def hold_for_first(self, now: float) -> None:
        """Nothing runs: whoever comes first may take the pages of what the others wait for."""
        heads = (lane.head for lane in self.waiting.lanes())
        self._hold_for_one([(self.waiting.rank(head), head) for head in heads], now)

    def _end_failed(self) -> None:
        """Ends what waits in vain, even while there is no place to be had."""
        for lane in self.waiting.some_lanes(_NUM_POLLED):
            while lane and self._is_ready(lane.head) is None:
                pass

    def _serve_overdue(self, now: float) -> None:
        """Gives places to those who are owed one and have waited for max_wait_s."""
        self._unserved = set()
        if not self._is_fair:
            return
        lanes = [lane for lane in self.waiting.lanes() if self._is_overdue(lane.head, now)]
        if not lanes:
            return
        debtors = self._debtors(now)
        ready: list[tuple[Rank, Sequence]] = []
        loading: list[tuple[Rank, Sequence]] = []
        for lane in lanes:
            if debtors.owe(lane.standing) and (is_ready := self._is_ready(lane.head)) is not None:
                (ready if is_ready else loading).append((self.waiting.rank(lane.head), lane.head))
        self._hold_for_one(loading, now)
        self._serve_in_order(ready, now)

    def admitted(self, now: float) -> Iterator[Sequence]:
        """Fills free places, one for each turn; the caller plans each at once."""
        if not self._batch.has_place:
            return
        self.num_loading = 0
        self._passed = []
        candidates = Candidates(self.waiting.lanes(), self.waiting.rank)
        while self._batch.has_place and (best := candidates.pop()) is not None:
            lane = self._prefer_running(best, candidates)
            sequence = lane.head
            outcome = self._try(lane, now)
            if outcome is _Outcome.ADMITTED:
                yield sequence
            if outcome in (_Outcome.ADMITTED, _Outcome.FAILED):
                candidates.push(lane)
            elif outcome is _Outcome.BLOCKED and lane is best:
                self._refuse_if_hopeless(sequence)
                return

    def _try(self, lane: Lane, now: float) -> _Outcome:
        sequence = lane.head
        is_ready = self._is_ready(sequence)
        if is_ready is None:
            return _Outcome.FAILED
        if not is_ready:
            self.num_loading += len(lane)
            self._passed.append(sequence)
            if not self._is_fair and self._holder is None and self._is_overdue(sequence, now):
                self._hold_for_last(self._passed, now)
            return _Outcome.PASSED
        if not self._batch.has_place_for_adapters(sequence.cids):
            must_wait = not self._is_fair or sequence.sequence_id in self._unserved
            return _Outcome.BLOCKED if must_wait else _Outcome.PASSED
        if not self._start(sequence, now):
            return _Outcome.BLOCKED
        return _Outcome.ADMITTED

    def _prefer_running(self, best: Lane, candidates: Candidates) -> Lane:
        """A lane that is about as much entitled as the best, if it brings no adapter along."""
        head = best.head
        if not self._is_fair or self._batch.uses(head.cids) or head.sequence_id in self._unserved:
            return best
        choice, put_back = best, [best]
        for _ in range(_NUM_LOOKED_AT):
            lane = candidates.pop()
            if lane is None:
                break
            if best.standing.is_near(lane.standing) and self._batch.uses(lane.head.cids):
                choice = lane
                break
            put_back.append(lane)
            if not best.standing.is_near(lane.standing):
                break
        for lane in put_back if choice is not best else put_back[1:]:
            candidates.push(lane)
        return choice

    def _start(self, sequence: Sequence, now: float) -> bool:
        if not self._batch.admit(sequence, num_held=self.num_held_against(sequence)):
            return False
        self.waiting.remove(sequence)
        self._adapters.unwant(sequence.cids)
        sequence.standing.start()
        sequence.start(now)
        return True

    def _is_ready(self, sequence: Sequence) -> bool | None:
        """None: a load failed, and the request is gone."""
        try:
            return self._adapters.is_ready(sequence.cids)
        except LoramuxError as error:
            self._fail(sequence, "adapter", str(error))
            return None

    def _refuse_if_hopeless(self, sequence: Sequence) -> None:
        """Nothing runs and nothing is on its way, so the room that it lacks will never come."""
        if len(self._batch) == 0 and not self._adapters.is_loading:
            needed = self._batch.pages_for(sequence.num_tokens)
            self._fail(
                sequence,
                "memory",
                f"The request needs {needed} pages for {sequence.num_tokens} tokens beside those "
                f"of its adapters, and only {self._room.num_available} can be had: pinned adapters "
                "take the rest. Unpin one, or shorten the prompt.",
            )

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        return now - sequence.queued_s >= self._max_wait_s

    def _serve_in_order(self, ready: list[tuple[Rank, Sequence]], now: float) -> None:
        heapq.heapify(ready)
        num_preemptions = -1
        while ready:
            if num_preemptions != self.num_preemptions:
                num_preemptions, debtors = self.num_preemptions, self._debtors(now)
            _, sequence = heapq.heappop(ready)
            if debtors.owe(sequence.standing) and not self._serve(sequence, now):
                return

    def _serve(self, sequence: Sequence, now: float) -> bool:
        """False: it is owed a place that cannot be had in this step; nobody else is served."""
        if self._batch.could_admit(sequence, self._victims(sequence, now)):
            self._take_until(lambda: self._start(sequence, now), sequence, now)
        if sequence in self._batch:
            return True
        self._unserved.add(sequence.sequence_id)
        return False

    def _hold_for_one(self, loading: list[tuple[Rank, Sequence]], now: float) -> None:
        heapq.heapify(loading)
        before: list[Sequence] = []
        while loading and self._holder is None:
            before.append(heapq.heappop(loading)[1])
            self._hold_for_last(before, now)

    def _hold_for_last(self, before: list[Sequence], now: float) -> None:
        """Finds the pages that the last one's adapters lack and keeps them free, if any lacks.

        Those before it, who only need time, keep what they have.
        """
        sequence = before[-1]
        num_missing = self._adapters.missing_pages(sequence.cids)
        if num_missing == 0:
            return
        self._holder, self._num_held = sequence, num_missing
        cids = dict.fromkeys(cid for other in before for cid in other.cids)
        self._held_cids = [cid for cid in cids if self._adapters.acquire([cid])]
        for other in reversed(before):
            self._adapters.hurry(other.cids)
        if self._batch.pages_without(self._victims(sequence, now)) >= num_missing:
            self._take_until(lambda: self._room.num_available >= num_missing, sequence, now)
        self._room.make_room(num_missing)

    def _let_go(self) -> None:
        self._adapters.release(self._held_cids)
        self._holder, self._num_held, self._held_cids = None, 0, []

    def _take_until(self, is_enough: Callable[[], bool], sequence: Sequence, now: float) -> None:
        """Takes places from those who owe it one: the most served first, of those the newest."""
        while not is_enough():
            victims = self._victims(sequence, now)
            if not victims:
                return
            self.preempt(max(victims, key=self.waiting.rank), now)

    def _victims(self, sequence: Sequence, now: float) -> list[Sequence]:
        if not self._is_fair:
            return []
        standing, min_s = sequence.standing, self._max_wait_s
        return [other for other in self._batch if other.tenure(now, min_s).yields_to(standing)]

    def _debtors(self, now: float) -> Debtors:
        return Debtors(sequence.tenure(now, self._max_wait_s) for sequence in self._batch)
