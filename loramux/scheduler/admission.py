"""Admission of waiting sequences to the batch, and preemption of running ones.

The algorithm is the numbered rules of docs/scheduling.md; the methods cite them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from loramux.config.engine import SchedulerConfig
from loramux.errors import LoramuxError
from loramux.scheduler.batch import AdapterGate, Batch, PageReclaimer
from loramux.scheduler.fairness import PreemptionIndex, PreemptionLimit
from loramux.scheduler.queue import AdapterQueue, Candidates, WaitingQueues
from loramux.scheduler.running_queues import RunningQueues
from loramux.scheduler.sequence import Sequence

# Queues that each step checks for failed loads.
_NUM_POLLED = 32


class _Outcome(Enum):
    ADMITTED = auto()
    SKIPPED = auto()
    """Later sequences may be admitted first."""
    FAILED = auto()
    BLOCKED = auto()
    """No later sequence may be admitted."""


@dataclass(slots=True)
class _Affinity:
    """The state of R6 and R7 in one pass."""

    is_on: bool
    queues: RunningQueues | None = None
    """Created on first use."""


class Admission:
    """Moves sequences between the waiting queues and the batch."""

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
        self.waiting = WaitingQueues(is_fair=self._is_fair)
        self.num_loading = 0
        """Sequences that the last pass skipped because an adapter was not on the device."""
        self.num_preemptions = 0
        # R12: the sequence that pages are reserved for, their number, and its resident adapters.
        self._reserved_for: Sequence | None = None
        self._num_reserved = 0
        self._retained_cids: list[str] = []
        # The last sequence whose reservation found enough pages.
        self._had_pages_for: Sequence | None = None
        # Sequences that the current pass skipped because their adapters are not on the device.
        self._skipped: list[Sequence] = []
        # R10: entitled and ready sequences that did not get a slot in this step.
        self._unserved: set[int] = set()

    def num_reserved_against(self, sequence: Sequence) -> int:
        """R12: returns the number of pages that the sequence must leave to an earlier one."""
        holder, rank = self._reserved_for, self.waiting.rank
        return 0 if holder is None or rank(sequence) <= rank(holder) else self._num_reserved

    def retained_adapters(self) -> Counter[str]:
        """R12: returns the leases held for sequences that wait for the rest of their adapters."""
        return Counter(self._retained_cids)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended from its queue."""
        self.waiting.remove(sequence)
        self._adapters.remove_waiters(sequence.cids)
        self._release_reservation()

    def preempt(self, sequence: Sequence, now: float) -> None:
        """R11, R13: moves a running sequence back to its queue and frees what it holds."""
        self._adapters.add_waiters(sequence.cids)
        self._batch.remove(sequence)
        sequence.restart(now)
        sequence.clients.stop()
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def begin_step(self, now: float) -> None:
        self._release_reservation()
        self._end_failed()
        self._preempt_for_entitled(now)

    def admitted(self, now: float) -> Iterator[Sequence]:
        """R4 to R9: fills free slots; the caller plans each sequence before the next one."""
        self.num_loading = 0
        self._skipped = []
        if not self._batch.has_slot:
            return
        candidates = Candidates(self.waiting.queues(), self.waiting.rank)
        affinity = _Affinity(is_on=self._is_fair and not self._unserved)
        while self._batch.has_slot and (first := candidates.pop()) is not None:
            sequence, outcome = first.head, self._examine(first, now)
            if outcome is None:
                preferred = self._admit_by_affinity(first, affinity, now)
                if preferred is not None:
                    candidates.push(first)
                    yield preferred
                    continue
                outcome = _Outcome.ADMITTED if self._start(sequence, now) else _Outcome.BLOCKED
            if outcome is _Outcome.ADMITTED:
                if affinity.queues is not None:
                    affinity.queues.adapters_started(sequence.cids)
                yield sequence
            if outcome in (_Outcome.ADMITTED, _Outcome.FAILED):
                candidates.push(first)
            elif outcome is _Outcome.BLOCKED:
                self._refuse_if_hopeless(sequence)
                return

    def reserve_for_first(self, now: float) -> None:
        """R14: reserves pages for the first sequence in order if nothing runs."""
        if len(self._batch) > 0:
            return
        candidates = Candidates(self.waiting.queues(), self.waiting.rank)
        before: list[Sequence] = []
        while self._reserved_for is None and (queue := candidates.pop()) is not None:
            is_ready = self._is_ready(queue.head)
            if is_ready:
                return
            if is_ready is None:
                candidates.push(queue)
            else:
                before.append(queue.head)
                self._reserve_for_last(before, now)

    def _examine(self, queue: AdapterQueue, now: float) -> _Outcome | None:
        """R5, R9, R17: returns None if the queue's head may start as far as adapters decide."""
        sequence = queue.head
        is_ready = self._is_ready(sequence)
        if is_ready is None:
            return _Outcome.FAILED
        if not is_ready:
            self.num_loading += len(queue)
            self._skipped.append(sequence)
            if self._is_overdue(sequence, now) and now >= sequence.no_reservation_until_s:
                self._retain_adapters(sequence)
                if not self._is_fair and self._reserved_for is None:
                    self._reserve_for_last(self._skipped, now)
            return _Outcome.SKIPPED
        if self._batch.fits_adapter_limit(sequence.cids):
            is_computed = self._batch.is_computing_for(sequence)
            return _Outcome.SKIPPED if is_computed and not self._is_overdue(sequence, now) else None
        must_wait = not self._is_fair or sequence.sequence_id in self._unserved
        return _Outcome.BLOCKED if must_wait else _Outcome.SKIPPED

    def _is_ready(self, sequence: Sequence) -> bool | None:
        """R5: returns None, and ends the request, if the load of an adapter has failed."""
        try:
            return self._adapters.is_ready(sequence.cids)
        except LoramuxError as error:
            self._fail(sequence, "adapter", str(error))
            return None

    def _end_failed(self) -> None:
        """R5: ends requests whose load has failed, even while there is no free slot."""
        for queue in self.waiting.next_queues(_NUM_POLLED):
            while queue and self._is_ready(queue.head) is None:
                pass

    def _admit_by_affinity(
        self, first: AdapterQueue, affinity: _Affinity, now: float
    ) -> Sequence | None:
        """R6 to R8: admits a sequence before `first` to keep the number of adapters low."""
        head = first.head
        if not affinity.is_on or len(self._batch) == 0 or self._batch.runs_all(head.cids):
            return None
        if head.bypassed_since_s is not None and now - head.bypassed_since_s >= self._max_wait_s:
            return None
        if affinity.queues is None:
            affinity.queues = RunningQueues(self.waiting.queues(), self._batch)
        queues = affinity.queues
        queue = queues.pop_running(first.clients) or self._pop_longer(first, queues)
        if queue is None:
            return None
        sequence = queue.head
        if not self._would_be_preempted(sequence, head, now):
            affinity.is_on = self._start_without_evicting(head, sequence, now)
        queues.add(queue)
        if sequence not in self._batch:
            return None
        queues.adapters_started(sequence.cids)
        head.bypassed_since_s = now if head.bypassed_since_s is None else head.bypassed_since_s
        return sequence

    def _pop_longer(self, first: AdapterQueue, queues: RunningQueues) -> AdapterQueue | None:
        """R7: returns a longer queue of the tenant whose head is ready and within max_loras."""
        while (queue := queues.pop_longer(first)) is not None:
            cids = queue.head.cids
            if self._is_ready(queue.head) and self._batch.fits_adapter_limit(cids):
                return queue
        return None

    def _would_be_preempted(self, sequence: Sequence, first: Sequence, now: float) -> bool:
        """R8: returns whether `first` could preempt the sequence as soon as it runs."""
        clients = sequence.clients
        limit = PreemptionLimit(clients, clients.tenant.counter, clients.adapter.counter)
        return self._is_overdue(first, now) and limit.allows(first.clients)

    def _start_without_evicting(self, first: Sequence, sequence: Sequence, now: float) -> bool:
        """R8: starts the sequence without evicting the adapters of `first`."""
        if not self._adapters.acquire(first.cids):
            return False
        has_started = self._start(sequence, now)
        self._adapters.release(first.cids)
        return has_started

    def _start(self, sequence: Sequence, now: float) -> bool:
        reserved = self.num_reserved_against(sequence)
        if not self._batch.admit(sequence, num_reserved=reserved):
            return False
        self.waiting.remove(sequence)
        self._adapters.remove_waiters(sequence.cids)
        sequence.clients.start()
        sequence.start(now)
        return True

    def _refuse_if_hopeless(self, sequence: Sequence) -> None:
        """R14: refuses a sequence whose pages will never be free, as nothing runs or loads."""
        is_reserved = self._reserved_for is not None or bool(self._retained_cids)
        if len(self._batch) == 0 and not self._adapters.is_loading and not is_reserved:
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

    def _preempt_for_entitled(self, now: float) -> None:
        """R10: gives slots to entitled sequences, and reserves pages for those that load."""
        self._unserved = set()
        if not self._is_fair:
            return
        ready: list[AdapterQueue] = []
        loading: list[AdapterQueue] = []
        for queue in self._entitled_queues(now):
            if (is_ready := self._is_ready(queue.head)) is not None:
                (ready if is_ready else loading).append(queue)
        if ready or loading:
            self._preempt_in_order(
                Candidates(ready, self.waiting.rank), Candidates(loading, self.waiting.rank), now
            )

    def _entitled_queues(self, now: float) -> Iterator[AdapterQueue]:
        """R10: yields the queues whose head is overdue and may preempt a running sequence."""
        if len(self.waiting) == 0 or len(self._batch) == 0:
            return
        running = list(self._batch)
        total = (len(running), len(self.waiting))
        clients = running[0].clients
        if (clients.adapter.num_running, clients.adapter.num_waiting) == total:
            return
        if (clients.tenant.num_running, clients.tenant.num_waiting) == total:
            # Of a single tenant, only preemptible adapters matter: few among thousands.
            running = [s for s in running if s.clients.adapter.is_preemptible]
            if not running:
                return
        index = self._preemption_index(running, now)
        queues = [queue for queue in self.waiting.queues() if self._is_overdue(queue.head, now)]
        for queue in queues:
            if index.has_victim_for(queue.clients):
                yield queue

    def _preempt_in_order(self, ready: Candidates, loading: Candidates, now: float) -> None:
        """R10, R12: serves entitled queues in order, until one cannot be served in this step.

        Loading queues are examined until pages are reserved for one of them.
        """
        before: list[Sequence] = []
        num_preemptions, index = self.num_preemptions, self._preemption_index(self._batch, now)
        while True:
            if num_preemptions != self.num_preemptions:
                num_preemptions = self.num_preemptions
                index = self._preemption_index(self._batch, now)
            is_loading = self._reserved_for is None and loading.comes_before(ready)
            queue = loading.pop() if is_loading else ready.pop()
            if queue is None:
                return
            # Preemptions for earlier queues may have changed it, or put another head into it.
            if not self._is_overdue(queue.head, now) or not index.has_victim_for(queue.clients):
                continue
            if is_loading:
                before.append(queue.head)
                self._reserve_for_last(before, now)
            elif not self._preempt_for(queue.head, now):
                return

    def _preempt_for(self, sequence: Sequence, now: float) -> bool:
        """R10: starts an entitled sequence; returns False if it gets no slot in this step."""
        if self._batch.could_admit(sequence, self._victims(sequence, now)):
            self._preempt_until(lambda: self._start(sequence, now), sequence, now)
        if sequence in self._batch:
            return True
        self._unserved.add(sequence.sequence_id)
        return False

    def _preempt_until(self, is_enough: Callable[[], bool], sequence: Sequence, now: float) -> None:
        """R11: preempts the victim that is last in order until there is enough."""
        while not is_enough():
            victims = self._victims(sequence, now)
            if not victims:
                return
            self.preempt(max(victims, key=self.waiting.rank), now)

    def _victims(self, sequence: Sequence, now: float) -> list[Sequence]:
        """R10, R11: returns the running sequences that may be preempted for this one."""
        if not self._is_fair:
            return []
        clients, min_s = sequence.clients, self._max_wait_s
        return [
            other for other in self._batch if other.preemption_limit(now, min_s).allows(clients)
        ]

    def _preemption_index(self, running: Iterable[Sequence], now: float) -> PreemptionIndex:
        return PreemptionIndex(
            sequence.preemption_limit(now, self._max_wait_s) for sequence in running
        )

    def _reserve_for_last(self, before: list[Sequence], now: float) -> None:
        """R12: reserves the pages that the adapters of the last sequence lack, if they lack any.

        The sequences before it, which only wait for their loads, retain their adapters.
        """
        sequence = before[-1]
        num_missing = self._adapters.missing_pages(sequence.cids)
        if num_missing == 0:
            return
        has_pages = self._reclaimer.num_available >= num_missing
        if has_pages and sequence is self._had_pages_for and not self._adapters.is_loading:
            # The load did not start for another reason than pages: others must not wait for it.
            sequence.no_reservation_until_s = now + self._max_wait_s
        if now < sequence.no_reservation_until_s:
            before.pop()
            return
        self._reserved_for, self._num_reserved = sequence, num_missing
        for other in reversed(before):
            self._retain_adapters(other)
            self._adapters.prioritize(other.cids)
        if self._batch.pages_without(self._victims(sequence, now)) >= num_missing:
            self._preempt_until(lambda: self._reclaimer.num_available >= num_missing, sequence, now)
        self._had_pages_for = sequence if self._reclaimer.reclaim(num_missing) else None

    def _retain_adapters(self, sequence: Sequence) -> None:
        """R12: leases the resident ones of several adapters, so that they are not evicted."""
        for cid in sequence.cids if len(sequence.cids) > 1 else ():
            if cid not in self._retained_cids and self._adapters.acquire([cid]):
                self._retained_cids.append(cid)

    def _release_reservation(self) -> None:
        self._adapters.release(self._retained_cids)
        self._reserved_for, self._num_reserved, self._retained_cids = None, 0, []
