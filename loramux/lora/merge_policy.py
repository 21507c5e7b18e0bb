"""Decides from measured step times when to merge a selection of adapters into the base weights.

Ski rental: a merge starts when the time that it would have saved since the selection began to
dominate equals the time that building it takes. Whatever the traffic does next, that costs at most
about twice what the best decision in hindsight would have cost.
"""

from __future__ import annotations

import enum
import statistics
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from loramux.errors import InvalidRequest
from loramux.types.request import Selection

# Class of steps of similar cost: bit lengths of the numbers of rows and of sequences.
Shape = tuple[int, int]
Times = dict[Shape, deque[tuple[int, float]]]


class MergeState(enum.Enum):
    WATCHING = "watching"
    BUILDING = "building"
    MERGED = "merged"
    RESTING = "resting"
    """A merge was measured to be no faster: no merge is tried for a while."""


MOVES: dict[MergeState, frozenset[MergeState]] = {
    MergeState.WATCHING: frozenset({MergeState.BUILDING}),
    MergeState.BUILDING: frozenset({MergeState.MERGED, MergeState.WATCHING}),
    MergeState.MERGED: frozenset({MergeState.WATCHING, MergeState.RESTING}),
    MergeState.RESTING: frozenset({MergeState.WATCHING}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRules:
    window_steps: int = 64
    """Window of the shares below; a merge is also evaluated this often."""
    enter_share: float = 0.6
    """A selection starts to dominate at this share of steps whose rows all use it."""
    leave_share: float = 0.4
    """A selection stops to dominate at this share."""
    min_saving: float = 0.01
    """A merge that saves a smaller part of its steps' time is dropped."""
    assumed_saving: float = 0.05
    """Assumed saving while no step without adapters has been measured."""
    assumed_cost_steps: float = 25.0
    """Assumed cost of building, in steps, before the first merge: both read every weight."""
    min_samples: int = 8
    max_samples: int = 16
    """Minimum number of step times and comparisons, and the number of latest ones kept."""
    max_age_steps: int = 512
    """Older samples are ignored: contexts grow, and the load of the machine changes."""
    probe_every: int = 8
    """One in so many steps of a merged selection runs unmerged, for comparison."""
    rest_steps: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.leave_share < self.enter_share <= 1:
            raise InvalidRequest("leave_share must be below enter_share, both in [0, 1].")
        # Otherwise one selection could dominate while another is still merged.
        if self.enter_share + self.leave_share < 1:
            raise InvalidRequest("enter_share and leave_share must add up to 1 or more.")
        if self.probe_every < 2:
            raise InvalidRequest("probe_every must be 2 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    selection: Selection | None
    """The selection of all rows; None: they differ."""
    num_rows: int
    num_sequences: int
    merged: bool
    seconds: float

    @property
    def shape(self) -> Shape:
        return self.num_rows.bit_length(), self.num_sequences.bit_length()


class MergePolicy:
    """State machine: observe() every step; `state` and `selection` say what to build or use."""

    def __init__(
        self,
        cost_bytes: Callable[[Selection], int | None],
        rules: MergeRules | None = None,
    ) -> None:
        """cost_bytes: bytes of a merge of the selection; None: it cannot be merged."""
        self.rules = rules or MergeRules()
        self.state = MergeState.WATCHING
        self.selection: Selection | None = None
        """The dominating selection: watched, being built, or merged."""
        self.num_moves: Counter[tuple[MergeState, MergeState]] = Counter()
        self._cost_bytes = cost_bytes
        self._bytes_per_s: float | None = None
        self._window = _Window(self.rules.window_steps)
        self._times = _StepTimes(self.rules)
        self._num_bytes: int | None = None
        self._missed_s = 0.0
        self._num_steps = 0
        self._num_pure = 0
        self._decide = {
            MergeState.WATCHING: self._watch,
            MergeState.BUILDING: self._build,
            MergeState.MERGED: self._judge,
            MergeState.RESTING: self._rest,
        }

    def runs_merged(self, selection: Selection | None) -> bool:
        """Whether a step whose rows all have this selection uses the merged weights."""
        if self.state is not MergeState.MERGED or selection != self.selection:
            return False
        return (self._num_pure + 1) % self.rules.probe_every != 0

    def observe(self, sample: StepSample) -> None:
        self._window.add(sample.selection)
        self._times.now += 1
        self._num_steps += 1
        if sample.selection and sample.selection == self.selection:
            self._num_pure += 1
            if self.state is MergeState.MERGED and not sample.merged:
                self._times.compare(sample)
            self._times.add(self._times.fast if sample.merged else self._times.slow, sample)
        elif sample.selection == () and self.state is not MergeState.MERGED:
            # Merged weights have the base's shapes, so a step on them costs what a base step costs.
            self._times.add(self._times.fast, sample)
        self._decide[self.state](sample)

    def built(self, *, num_bytes: int, seconds: float) -> None:
        """Report that the merged weights are complete, and the time that building took."""
        self._move(MergeState.MERGED)
        if seconds > 0:
            self._bytes_per_s = num_bytes / seconds
        self._times.start_comparing()

    def lost(self) -> None:
        """Report that an adapter of the selection was evicted: the merge is dropped."""
        assert self.state in (MergeState.BUILDING, MergeState.MERGED)
        self._follow(None)
        self._move(MergeState.WATCHING)

    def _watch(self, sample: StepSample) -> None:
        if self._no_longer_dominates():
            self._follow(None)
        if self.selection is None and self._dominates(sample.selection):
            self._follow(sample.selection)
        if self.selection is None or sample.selection != self.selection:
            return
        cost_s = self._cost_s(sample.shape)
        self._missed_s = max(0.0, self._missed_s + self._times.saving_s(sample.shape))
        if cost_s is not None and self._missed_s >= cost_s:
            self._move(MergeState.BUILDING)

    def _build(self, sample: StepSample) -> None:
        if self._no_longer_dominates():
            self._follow(None)
            self._move(MergeState.WATCHING)

    def _judge(self, sample: StepSample) -> None:
        if self._no_longer_dominates():
            self._follow(None)
            self._move(MergeState.WATCHING)
        elif self._num_steps >= self.rules.window_steps:
            self._num_steps = 0
            saving = self._times.measured_saving()
            if saving is not None and saving < self.rules.min_saving:
                self._move(MergeState.RESTING)

    def _rest(self, sample: StepSample) -> None:
        if self._num_steps >= self.rules.rest_steps:
            self._follow(None)
            self._move(MergeState.WATCHING)

    def _dominates(self, selection: Selection | None) -> bool:
        return bool(selection) and self._window.share(selection) >= self.rules.enter_share

    def _no_longer_dominates(self) -> bool:
        selection = self.selection
        return bool(selection) and self._window.share(selection) <= self.rules.leave_share

    def _follow(self, selection: Selection | None) -> None:
        self.selection = selection
        self._missed_s = 0.0
        self._num_bytes = None if selection is None else self._cost_bytes(selection)
        # The fast times do not depend on the selection.
        self._times.slow.clear()

    def _cost_s(self, shape: Shape) -> float | None:
        """Estimated seconds of building; None: it cannot be merged, or too few samples."""
        if self._num_bytes is None:
            return None
        if self._bytes_per_s is not None:
            return self._num_bytes / self._bytes_per_s
        step_s = self._times.median_s(self._times.slow, shape)
        return None if step_s is None else self.rules.assumed_cost_steps * step_s

    def _move(self, state: MergeState) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.num_moves[self.state, state] += 1
        self.state = state
        self._missed_s = 0.0
        self._num_steps = 0
        self._num_pure = 0


class _Window:
    """Counts of the selections of whole steps among the latest `size` steps."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._steps: deque[Selection | None] = deque()
        self._counts: Counter[Selection | None] = Counter()

    def add(self, selection: Selection | None) -> None:
        self._steps.append(selection)
        self._counts[selection] += 1
        if len(self._steps) > self._size:
            oldest = self._steps.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def share(self, selection: Selection | None) -> float:
        """Share of the whole window, also before it is full."""
        return self._counts[selection] / self._size


class _StepTimes:
    """The latest step times by shape, each with the number of its step."""

    def __init__(self, rules: MergeRules) -> None:
        self._rules = rules
        self.now = 0
        self.slow: Times = {}
        """Steps of the selection, unmerged."""
        self.fast: Times = {}
        """Steps of the selection, merged, or of the base."""
        self._savings: deque[float] = deque(maxlen=rules.max_samples)

    def add(self, kind: Times, sample: StepSample) -> None:
        times = kind.setdefault(sample.shape, deque(maxlen=self._rules.max_samples))
        times.append((self.now, sample.seconds))

    def saving_s(self, shape: Shape) -> float:
        """Estimated saving of a merge in one step of this shape."""
        slow, fast = self.median_s(self.slow, shape), self.median_s(self.fast, shape)
        if slow is None:
            return 0.0
        return self._rules.assumed_saving * slow if fast is None else slow - fast

    def start_comparing(self) -> None:
        self.fast.clear()
        self._savings.clear()

    def compare(self, probe: StepSample) -> None:
        """Compare an unmerged step with the merged steps just before it (same machine load)."""
        oldest = self.now - 2 * self._rules.probe_every
        near = [s for step, s in self.fast.get(probe.shape, ()) if step > oldest]
        if near and probe.seconds > 0:
            self._savings.append(1 - statistics.median(near) / probe.seconds)

    def measured_saving(self) -> float | None:
        """Measured part of an unmerged step that a merge saves; None: too few comparisons."""
        enough = len(self._savings) >= self._rules.min_samples
        return statistics.median(self._savings) if enough else None

    def median_s(self, kind: Times, shape: Shape) -> float | None:
        oldest = self.now - self._rules.max_age_steps
        seconds = [s for step, s in kind.get(shape, ()) if step > oldest]
        return statistics.median(seconds) if len(seconds) >= self._rules.min_samples else None
