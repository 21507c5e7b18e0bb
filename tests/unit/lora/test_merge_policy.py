from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.errors import InvalidRequest
from loramux.lora.merge_policy import MOVES, MergePolicy, MergeRules, MergeState, StepSample
from loramux.types.request import Selection

A: Selection = (("a", 1.0),)
B: Selection = (("b", 1.0),)
HALF_A: Selection = (("a", 0.5),)
BASE: Selection = ()
TABLE: dict[Selection, int] = {A: 100, B: 100, HALF_A: 100}
RULES = MergeRules(
    window_steps=10, min_samples=2, probe_every=4, rest_steps=20, assumed_cost_steps=0.5
)
# A merge of 100 bytes takes 0.1 s, half a step; the guess is that it saves 5 % of each.
SLOW_S, FAST_S = 0.2, 0.15


class Traffic:
    """Steps of a machine on which a merged or base step takes fast_s and any other slow_s."""

    def __init__(
        self,
        *,
        fast_s: float = FAST_S,
        cost: Callable[[Selection], int | None] = TABLE.get,
        rules: MergeRules = RULES,
    ) -> None:
        self.policy = MergePolicy(cost, rules)
        self.fast_s = fast_s
        self.factor = 1.0
        self.states = [self.policy.state]
        self.num_merged = 0

    def step(self, selection: Selection | None, *, builds: bool = True) -> None:
        merged = self.policy.runs_merged(selection)
        assert not merged or (selection == self.policy.selection and selection)
        self.num_merged += merged
        seconds = self.factor * (self.fast_s if merged or selection == BASE else SLOW_S)
        sample = StepSample(
            selection=selection, num_rows=4, num_sequences=4, merged=merged, seconds=seconds
        )
        self.policy.observe(sample)
        self._note()
        if builds and self.policy.state is MergeState.BUILDING:
            self.policy.built(num_bytes=100, seconds=0.1)
            self._note()

    def steps(self, selection: Selection | None, count: int) -> None:
        for _ in range(count):
            self.step(selection)

    def _note(self) -> None:
        if self.policy.state is not self.states[-1]:
            self.states.append(self.policy.state)


def traffic(fast_s: float = FAST_S) -> Traffic:
    return Traffic(fast_s=fast_s)


def test_a_merge_begins_when_it_would_have_paid_for_itself_and_not_before() -> None:
    """Six steps make it dominate; then two to measure, and ten that each miss 0.01 of 0.1 s."""
    run = traffic()
    run.steps(A, 16)
    assert run.policy.state is MergeState.WATCHING
    run.steps(A, 2)
    assert run.states == [MergeState.WATCHING, MergeState.BUILDING, MergeState.MERGED]


def test_measured_base_steps_replace_the_guess() -> None:
    """A saving of 0.05 s instead of 0.01 s pays for the merge five times as soon."""
    run = traffic()
    run.steps(BASE, 4)
    run.steps(A, 10)
    assert run.policy.state is MergeState.MERGED


def test_the_cost_of_a_merge_is_measured_by_the_first() -> None:
    """The next is begun when it has missed what the first has taken, not what was guessed."""
    rules = dataclasses.replace(RULES, assumed_cost_steps=0.0)
    run = Traffic(rules=rules)
    run.steps(A, 8)
    assert run.policy.state is MergeState.MERGED
    run.policy.lost()
    run.steps(B, 6)
    assert run.policy.selection == B
    run.steps(B, 10)
    assert run.policy.state is MergeState.WATCHING
    run.steps(B, 2)
    assert run.policy.state is MergeState.MERGED


def test_no_merge_is_made_where_base_steps_are_no_faster() -> None:
    run = traffic(fast_s=SLOW_S)
    for _ in range(100):
        run.steps(A, 4)
        run.step(BASE)
    assert run.states == [MergeState.WATCHING]


def test_a_merge_that_is_not_faster_is_given_up_and_not_tried_again_at_once() -> None:
    run = traffic(fast_s=SLOW_S)
    run.steps(A, 40)
    assert run.states[-3:] == [MergeState.BUILDING, MergeState.MERGED, MergeState.RESTING]
    run.steps(A, RULES.rest_steps - 5)
    assert run.states.count(MergeState.MERGED) == 1


def test_a_merge_that_is_faster_stays_while_its_selection_dominates() -> None:
    run = traffic()
    run.steps(A, 500)
    assert run.states[-1] is MergeState.MERGED and len(run.states) == 3
    assert run.num_merged == pytest.approx(480 * 3 / 4, abs=5)


def test_a_machine_that_gets_busier_does_not_make_a_merge_look_slow() -> None:
    """All steps take ten times as long for a while; the merged ones are still the faster ones."""
    run = traffic()
    for factor in (1.0, 10.0, 1.0, 10.0):
        run.factor = factor
        run.steps(A, 40)
    assert run.states[-1] is MergeState.MERGED and len(run.states) == 3


def test_a_merge_goes_when_its_selection_no_longer_dominates() -> None:
    run = traffic()
    run.steps(A, 20)
    run.steps(None, 5)
    assert run.policy.state is MergeState.MERGED
    run.steps(None, 1)
    assert run.policy.state is MergeState.WATCHING and run.policy.selection is None


def test_a_merge_half_built_goes_too() -> None:
    run = traffic()
    for _ in range(18):
        run.step(A, builds=False)
    assert run.policy.state is MergeState.BUILDING
    for _ in range(6):
        run.step(B, builds=False)
    assert run.policy.state is MergeState.WATCHING


def test_another_selection_takes_over() -> None:
    run = traffic()
    run.steps(A, 30)
    run.steps(B, 30)
    assert run.policy.state is MergeState.MERGED and run.policy.selection == B


def test_selections_that_take_turns_are_never_merged() -> None:
    run = traffic()
    for _ in range(200):
        run.step(A)
        run.step(B)
    assert run.states == [MergeState.WATCHING]


def test_the_same_adapter_at_another_weight_is_another_selection() -> None:
    run = traffic()
    run.steps(A, 30)
    assert not run.policy.runs_merged(HALF_A) and not run.policy.runs_merged(None)


@pytest.mark.parametrize("selection", [BASE, None, (("unknown", 1.0),)])
def test_what_cannot_be_merged_is_left_alone(selection: Selection | None) -> None:
    run = traffic()
    run.steps(selection, 200)
    assert run.states == [MergeState.WATCHING]


def test_a_lost_adapter_is_watched_from_the_start_again() -> None:
    run = traffic()
    run.steps(A, 20)
    run.policy.lost()
    assert run.policy.state is MergeState.WATCHING
    run.steps(A, 2)
    assert run.policy.state is MergeState.WATCHING and run.policy.selection == A
    run.steps(A, 10)
    assert run.policy.state is MergeState.MERGED


def test_old_times_do_not_count() -> None:
    """Base steps of a slower hour would say for ever that a merge saves nothing."""
    rules = MergeRules(window_steps=10, min_samples=2, assumed_cost_steps=0.5, max_age_steps=30)
    run = Traffic(fast_s=9.0, rules=rules)
    run.steps(BASE, 10)
    run.steps(A, 25)
    assert run.policy.state is MergeState.WATCHING
    run.steps(A, 30)
    assert MergeState.BUILDING in run.states


@pytest.mark.parametrize(
    "settings",
    [
        {"enter_share": 0.4, "leave_share": 0.6},
        {"enter_share": 0.6, "leave_share": 0.3},
        {"probe_every": 1},
    ],
)
def test_rules_that_contradict_themselves_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        MergeRules(**settings)  # type: ignore[arg-type]


PHASES = st.lists(
    st.tuples(
        st.sampled_from([A, A, A, B, HALF_A, BASE, None]), st.integers(1, 40), st.floats(0.001, 0.5)
    ),
    max_size=20,
)


@settings(max_examples=150)
@given(phases=PHASES, losses=st.sets(st.integers(0, 300)), delay=st.integers(1, 7))
def test_any_traffic_keeps_to_the_table_and_no_merge_begins_before_it_is_earned(
    phases: list[tuple[Selection | None, int, float]], losses: set[int], delay: int
) -> None:
    """No step can save more than SLOW_S, so a merge of 1 s needs five steps of its own first."""
    rules = dataclasses.replace(RULES, assumed_cost_steps=5)
    run = Traffic(cost=lambda selection: 1000 if selection in TABLE else None, rules=rules)
    policy, num_steps, num_own = run.policy, 0, 0
    for selection, count, fast_s in phases:
        run.fast_s = fast_s
        for _ in range(count):
            old_state, old_selection = policy.state, policy.selection
            run.step(selection, builds=num_steps % delay == 0)
            num_steps += 1
            num_own = num_own + (selection == policy.selection) if policy.selection else 0
            if old_state is MergeState.WATCHING and policy.state is not MergeState.WATCHING:
                assert policy.selection == selection and selection in TABLE and num_own >= 5
                num_own = 0
            elif policy.state in (MergeState.BUILDING, MergeState.MERGED):
                assert policy.selection == old_selection, "a merge changes hands unseen"
                if num_steps in losses:
                    policy.lost()
    assert all(new in MOVES[old] for old, new in policy.num_moves)
