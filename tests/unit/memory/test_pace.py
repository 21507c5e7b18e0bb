from __future__ import annotations

from loramux.memory.pace import Pace


class Worked:
    """A thread's working time, as the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_pace(rest: float) -> tuple[Pace, Worked, list[float]]:
    worked = Worked()
    rests: list[float] = []
    return Pace(rest, worked_s=worked, sleep=rests.append), worked, rests


def test_a_thread_rests_in_proportion_to_its_work_since_the_last_rest() -> None:
    pace, worked, rests = make_pace(2.0)
    worked.seconds = 7.0
    pace.begin()
    for seconds in (7.5, 8.5):
        worked.seconds = seconds
        pace.pause()
    assert rests == [1.0, 2.0], "work before the load was counted, or some of it twice"


def test_nobody_rests_while_the_step_loop_waits() -> None:
    pace, worked, rests = make_pace(2.0)
    pace.begin()
    with pace.awaited():
        worked.seconds = 1.0
        pace.pause()
    assert rests == [], "a step that waits for an adapter waits for a rest as well"
    pace.pause()
    assert len(rests) == 1, "loads go on at full speed beside steps"
