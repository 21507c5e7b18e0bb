"""Constraints of sequences: they advance with each token, end it, or fail the whole request."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from loramux.errors import InvalidRequest
from loramux.types.request import FinishReason
from tests.unit.scheduler.scheduler_factory import make_request, wide


@dataclass
class CountingConstraint:
    """Is complete, or fails, after so many tokens."""

    ends_after: int = 100
    fails_after: int = 100
    seen: list[int] = field(default_factory=list)
    allowed: None = None

    @property
    def is_complete(self) -> bool:
        return len(self.seen) >= self.ends_after

    @property
    def error(self) -> str | None:
        return "no token is left" if len(self.seen) >= self.fails_after else None

    def restricts(self, num_outputs: int) -> bool:
        return True

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)


def test_a_complete_grammar_ends_its_choice_and_keeps_the_token() -> None:
    world = wide()
    constraint = CountingConstraint(ends_after=2)
    world.scheduler.add(make_request("a"), 0.0, [constraint])
    events = world.run()
    assert constraint.seen == [7, 7]
    assert [event.token_id for event in events] == [7, 7]
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].stop_token_id is None


def test_a_failed_constraint_ends_all_choices_of_its_request_alone() -> None:
    world = wide(max_sequences=3)
    request = make_request("a", n=2)
    failing = [CountingConstraint(fails_after=2), CountingConstraint()]
    world.scheduler.add(request, 0.0, failing)
    world.add("b", max_tokens=4)
    events = world.run()
    failed = [event for event in events if event.error_code == "grammar"]
    assert {(event.request_id, event.index) for event in failed} == {("a", 0), ("a", 1)}
    assert failed[0].error == "no token is left"
    assert sum(event.request_id == "b" for event in events) == 4


def test_a_request_that_cannot_run_is_refused_before_it_is_queued() -> None:
    world = wide()
    world.scheduler.check(make_request("a"))
    with pytest.raises(InvalidRequest):
        world.scheduler.check(make_request("a", num_prompt=[]))
    assert not world.scheduler.has_work
