"""Who gets a place in the batch, and who has to give one up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from loramux.config.engine import SchedulerConfig
from loramux.errors import LoramuxError
from loramux.scheduler.batch import AdapterGate, Batch, PageReclaimer
from loramux.scheduler.fairness import Debtors, Tenure
from loramux.scheduler.queue import Candidates, Lane, WaitingQueue
from loramux.scheduler.running_queues import RunningLanes
from loramux.scheduler.sequence import Sequence

# Lanes that a step looks at for loads that failed.
_NUM_POLLED = 32


class _Outcome(Enum):
    ADMITTED = auto()
    PASSED = auto()
    """Others may go first."""
    FAILED = auto()
    BLOCKED = auto()
    """Nobody may go first."""


@dataclass(slots=True)
class _Preference:
    """Of one pass, for sequences that bring no adapter along, or one for several."""

    is_on: bool
    lanes: RunningLanes | None = None
    """Made when they are needed."""


class Admission:
    """The queue on one side, the batch on the other; Scheduler's docstring has the rules."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        batch: Batch,
        reclaimer: PageReclaimer,
        adapters: AdapterGate,
        fail: Callable[[Sequence, str, str], None],
    ) -> None:
        self._max_wait_s = config.max_wait_s
        self._is_fair = config.schedule == "fair"
        self._batch = batch
        self._reclaimer = reclaimer
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
        # The last for whom enough pages were free when the adapters were to be loaded.
        self._had_room: Sequence | None = None
        # Those whose adapters the pass found missing so far.
        self._passed: list[Sequence] = []
        # Owed a place, ready, and without one in this step.
        self._unserved: set[int] = set()

    def num_held_against(self, sequence: Sequence) -> int:
        """Pages that it must leave for somebody who comes first."""
        holder, rank = self._holder, self.waiting.rank
        return 0 if holder is None or rank(sequence) <= rank(holder) else self._num_held

    def held_adapters(self) -> Counter[str]:
        """Leased for a sequence that waits for the rest of its adapters."""
        return Counter(self._held_cids)

    def leave(self, sequence: Sequence) -> None:
        """Out of the queue, for good."""
        self.waiting.remove(sequence)
        self._adapters.remove_waiters(sequence.cids)
        self._let_go()

    def preempt(self, sequence: Sequence, now: float) -> None:
        """It gives everything back and waits again, protected as at its arrival."""
        self._adapters.add_waiters(sequence.cids)
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
        """If nothing runs, whoever comes first may take the pages of what others wait for."""
        if len(self._batch) > 0:
            return
        candidates = Candidates(self.waiting.lanes(), self.waiting.rank)
        before: list[Sequence] = []
        while self._holder is None and (lane := candidates.pop()) is not None:
            is_ready = self._is_ready(lane.head)
            if is_ready:
                return
            if is_ready is None:
                candidates.push(lane)
            else:
                before.append(lane.head)
                self._hold_for_last(before, now)

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
        ready: list[Lane] = []
        loading: list[Lane] = []
        for lane in self._owed_lanes(now):
            if (is_ready := self._is_ready(lane.head)) is not None:
                (ready if is_ready else loading).append(lane)
        if ready or loading:
            self._serve_in_order(
                Candidates(ready, self.waiting.rank), Candidates(loading, self.waiting.rank), now
            )

    def _owed_lanes(self, now: float) -> Iterator[Lane]:
        """Those whose heads have waited for max_wait_s and are owed a place."""
        if len(self.waiting) == 0 or len(self._batch) == 0:
            return
        running = list(self._batch)
        everybody = (len(running), len(self.waiting))
        standing = running[0].standing
        if (standing.adapter.num_running, standing.adapter.num_waiting) == everybody:
            return
        if (standing.tenant.num_running, standing.tenant.num_waiting) == everybody:
            # Of the only tenant, adapters with a place to give can owe one. While the lanes are
            # looked at, nobody gets a place. Among a thousand adapters, few have any to give.
            running = [s for s in running if s.standing.adapter.has_to_give]
            if not running:
                return
        debtors = self._debtors(running, now)
        lanes = [lane for lane in self.waiting.lanes() if self._is_overdue(lane.head, now)]
        for lane in lanes:
            if debtors.owe(lane.standing):
                yield lane

    def admitted(self, now: float) -> Iterator[Sequence]:
        """Fills free places, one for each turn; the caller plans each at once."""
        self.num_loading = 0
        self._passed = []
        if not self._batch.has_place:
            return
        candidates = Candidates(self.waiting.lanes(), self.waiting.rank)
        preference = _Preference(is_on=self._is_fair and not self._unserved)
        while self._batch.has_place and (best := candidates.pop()) is not None:
            sequence, outcome = best.head, self._examine(best, now)
            if outcome is None:
                preferred = self._start_preferred(best, preference, now)
                if preferred is not None:
                    candidates.push(best)
                    yield preferred
                    continue
                outcome = _Outcome.ADMITTED if self._start(sequence, now) else _Outcome.BLOCKED
            if outcome is _Outcome.ADMITTED:
                if preference.lanes is not None:
                    preference.lanes.enter(sequence.cids)
                yield sequence
            if outcome in (_Outcome.ADMITTED, _Outcome.FAILED):
                candidates.push(best)
            elif outcome is _Outcome.BLOCKED:
                self._refuse_if_hopeless(sequence)
                return

    def _examine(self, lane: Lane, now: float) -> _Outcome | None:
        """None: it may start, if there are pages."""
        sequence = lane.head
        is_ready = self._is_ready(sequence)
        if is_ready is None:
            return _Outcome.FAILED
        if not is_ready:
            self.num_loading += len(lane)
            self._passed.append(sequence)
            if self._is_overdue(sequence, now) and now >= sequence.no_hold_until_s:
                self._keep(sequence)
                if not self._is_fair and self._holder is None:
                    self._hold_for_last(self._passed, now)
            return _Outcome.PASSED
        if self._batch.has_place_for_adapters(sequence.cids):
            return None
        must_wait = not self._is_fair or sequence.sequence_id in self._unserved
        return _Outcome.BLOCKED if must_wait else _Outcome.PASSED

    def _start_preferred(self, best: Lane, preference: _Preference, now: float) -> Sequence | None:
        """Starts one that may go before the best to keep the number of adapters down."""
        first = best.head
        if not preference.is_on or len(self._batch) == 0 or self._batch.uses(first.cids):
            return None
        if first.passed_over_s is not None and now - first.passed_over_s >= self._max_wait_s:
            return None
        if preference.lanes is None:
            preference.lanes = RunningLanes(self.waiting.lanes(), self._batch)
        lanes = preference.lanes
        lane = lanes.pop(best.standing) or self._pop_fuller(best, lanes)
        if lane is None:
            return None
        sequence = lane.head
        if not self._would_take_back(first, sequence, now):
            preference.is_on = self._start_sparing(first, sequence, now)
        lanes.add(lane)
        if sequence not in self._batch:
            return None
        lanes.enter(sequence.cids)
        first.passed_over_s = now if first.passed_over_s is None else first.passed_over_s
        return sequence

    def _pop_fuller(self, best: Lane, lanes: RunningLanes) -> Lane | None:
        """Its head may start, if there are pages."""
        while (lane := lanes.pop_fuller(best)) is not None:
            cids = lane.head.cids
            if self._is_ready(lane.head) and self._batch.has_place_for_adapters(cids):
                return lane
        return None

    def _would_take_back(self, best: Sequence, other: Sequence, now: float) -> bool:
        """Whether the other would owe the best its place as soon as it had it."""
        standing = other.standing
        tenure = Tenure(standing, standing.tenant.counter, standing.adapter.counter)
        return self._is_overdue(best, now) and tenure.yields_to(best.standing)

    def _start_sparing(self, best: Sequence, other: Sequence, now: float) -> bool:
        """Starts the other, not in the pages of the best's adapters."""
        if not self._adapters.acquire(best.cids):
            return False
        has_started = self._start(other, now)
        self._adapters.release(best.cids)
        return has_started

    def _start(self, sequence: Sequence, now: float) -> bool:
        if not self._batch.admit(sequence, num_held=self.num_held_against(sequence)):
            return False
        self.waiting.remove(sequence)
        self._adapters.remove_waiters(sequence.cids)
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
        """Nothing runs, loads or is kept, so the room that it lacks will never come."""
        is_kept = self._holder is not None or bool(self._held_cids)
        if len(self._batch) == 0 and not self._adapters.is_loading and not is_kept:
            needed = self._batch.pages_for(sequence.num_tokens)
            self._fail(
                sequence,
                "memory",
                f"The request needs {needed} pages for {sequence.num_tokens} tokens beside those "
                f"of its adapters, and only {self._reclaimer.num_available} can be had: pinned "
                "adapters take the rest. Unpin one, or shorten the prompt.",
            )

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        return now - sequence.queued_s >= self._max_wait_s

    def _serve_in_order(self, ready: Candidates, loading: Candidates, now: float) -> None:
        """Those who are loading are looked at until pages are kept for one of them."""
        before: list[Sequence] = []
        num_preemptions, debtors = self.num_preemptions, self._debtors(self._batch, now)
        while True:
            if num_preemptions != self.num_preemptions:
                num_preemptions = self.num_preemptions
                debtors = self._debtors(self._batch, now)
            is_loading = self._holder is None and loading.comes_before(ready)
            lane = loading.pop() if is_loading else ready.pop()
            if lane is None:
                return
            # The others may have changed that, or a preempted one may stand at its head.
            if not self._is_overdue(lane.head, now) or not debtors.owe(lane.standing):
                continue
            if is_loading:
                before.append(lane.head)
                self._hold_for_last(before, now)
            elif not self._serve(lane.head, now):
                return

    def _serve(self, sequence: Sequence, now: float) -> bool:
        """False: it is owed a place that cannot be had in this step; nobody else is served."""
        if self._batch.could_admit(sequence, self._victims(sequence, now)):
            self._take_until(lambda: self._start(sequence, now), sequence, now)
        if sequence in self._batch:
            return True
        self._unserved.add(sequence.sequence_id)
        return False

    def _hold_for_last(self, before: list[Sequence], now: float) -> None:
        """Finds the pages that the last one's adapters lack and keeps them free, if any lacks.

        Those before it, who only need time, keep what they have.
        """
        sequence = before[-1]
        num_missing = self._adapters.missing_pages(sequence.cids)
        if num_missing == 0:
            return
        has_room = self._reclaimer.num_available >= num_missing
        if has_room and sequence is self._had_room and not self._adapters.is_loading:
            # It is not pages that keep the load from starting; others must not wait for it.
            sequence.no_hold_until_s = now + self._max_wait_s
        if now < sequence.no_hold_until_s:
            before.pop()
            return
        self._holder, self._num_held = sequence, num_missing
        for other in reversed(before):
            self._keep(other)
            self._adapters.prioritize(other.cids)
        if self._batch.pages_without(self._victims(sequence, now)) >= num_missing:
            self._take_until(lambda: self._reclaimer.num_available >= num_missing, sequence, now)
        self._had_room = sequence if self._reclaimer.reclaim(num_missing) else None

    def _keep(self, sequence: Sequence) -> None:
        """What it has of its adapters must not be evicted while it waits for the rest."""
        for cid in sequence.cids if len(sequence.cids) > 1 else ():
            if cid not in self._held_cids and self._adapters.acquire([cid]):
                self._held_cids.append(cid)

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

    def _debtors(self, running: Iterable[Sequence], now: float) -> Debtors:
        return Debtors(sequence.tenure(now, self._max_wait_s) for sequence in running)
