"""Merges a dominating adapter into copies of the base weights and runs pure steps on them.

A step whose rows all have the merged selection runs on the merged weights, every other step on the
base: no request waits for a switch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loramux.lora.attach import LoraContext
from loramux.lora.merge import MergedWeights, MergeSource
from loramux.lora.merge_policy import MergePolicy, MergeRules, MergeState, StepSample
from loramux.types.request import Selection
from loramux.types.step import StepPlan

# Part of a step's time that building merged weights may add to it (at least one site is built).
BUILD_SHARE = 0.25


class MergeController:
    """Wraps every forward of a plan: before_step() and after_step(), or step() for both."""

    def __init__(
        self,
        context: LoraContext,
        source: MergeSource,
        *,
        byte_limit: int,
        rules: MergeRules | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context = context
        self._source = source
        self._byte_limit = byte_limit
        self._clock = clock
        self._policy = MergePolicy(self._cost_bytes, rules)
        self._weights: MergedWeights | None = None
        self._build_s = 0.0
        self._last_step_s = 0.0
        self.num_merged_steps = 0

    @property
    def state(self) -> MergeState:
        return self._policy.state

    @property
    def selection(self) -> Selection | None:
        """The selection that is merged or being merged."""
        return None if self._weights is None else self._weights.selection

    @property
    def num_bytes(self) -> int:
        """Bytes of the merged copies, counted in full as soon as building starts."""
        return 0 if self._weights is None else self._weights.num_bytes

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Run the forward inside the context; after an exception no step is merged."""
        self.before_step(plan)
        start_s = self._clock()
        try:
            yield
        except BaseException:
            self._context.merged = None
            raise
        self.after_step(plan, self._clock() - start_s)

    def before_step(self, plan: StepPlan) -> None:
        self._drop_if_evicted()
        self._advance()
        self._context.merged = None
        if self._weights is not None and self._policy.runs_merged(common_selection(plan)):
            self._context.merged = self._weights.sites

    def after_step(self, plan: StepPlan, seconds: float) -> None:
        merged = self._context.merged is not None
        self._context.merged = None
        self._last_step_s = seconds
        self.num_merged_steps += merged
        self._policy.observe(
            StepSample(
                selection=common_selection(plan),
                num_rows=plan.num_tokens,
                num_sequences=len(plan.chunks),
                merged=merged,
                seconds=seconds,
            )
        )
        self._follow_policy()

    def forget(self, cid: str) -> None:
        """Drop merged weights that contain the adapter."""
        if self._weights is not None and any(cid == used for used, _ in self._weights.selection):
            self._drop()

    def check_integrity(self) -> None:
        """Check the invariants; call it between steps."""
        assert self._context.merged is None, "merged weights outside a step"
        assert self.num_bytes <= self._byte_limit, f"{self.num_bytes} > {self._byte_limit}"
        if self._weights is None:
            assert self.state in (MergeState.WATCHING, MergeState.RESTING), self.state
        else:
            assert self._weights.selection == self._policy.selection
            is_merged = self.state is MergeState.MERGED
            assert is_merged == self._weights.is_complete, self.state

    def _cost_bytes(self, selection: Selection) -> int | None:
        num_bytes = self._source.num_bytes(selection)
        return None if num_bytes is None or num_bytes > self._byte_limit else num_bytes

    def _drop_if_evicted(self) -> None:
        if self._weights is not None and not self._source.is_resident(self._weights.selection):
            self._drop()

    def _drop(self) -> None:
        self._weights = None
        self._policy.lost()

    def _advance(self) -> None:
        weights = self._weights
        if weights is None or weights.is_complete:
            return
        start_s = self._clock()
        deadline_s = start_s + BUILD_SHARE * self._last_step_s
        weights.advance(lambda: self._clock() < deadline_s)
        self._build_s += self._clock() - start_s
        if weights.is_complete:
            self._policy.built(num_bytes=weights.num_bytes, seconds=self._build_s)

    def _follow_policy(self) -> None:
        if self.state in (MergeState.WATCHING, MergeState.RESTING):
            self._weights = None
        elif self._weights is None:
            assert self._policy.selection is not None
            self._weights = MergedWeights(self._source, self._policy.selection)
            self._build_s = 0.0


def common_selection(plan: StepPlan) -> Selection | None:
    """Return the selection of all rows of the step; None: they differ."""
    selections = {chunk.selection for chunk in plan.chunks}
    return selections.pop() if len(selections) == 1 else None
