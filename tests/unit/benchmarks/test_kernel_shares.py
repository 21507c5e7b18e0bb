from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.studies.trace_profile import by_rows, kind_of, step_shares

STEP_END = "_choose"


def event(name: str, start: float, end: float, rows: int = 1, stream: int = 7) -> dict[str, Any]:
    args = {"stream": stream, "grid": [rows, 1, 1]}
    facts = {"ph": "X", "cat": "kernel", "name": name, "args": args}
    return {**facts, "ts": start, "dur": end - start}


def test_gate_and_up_with_their_activation_are_a_product() -> None:
    assert kind_of(event("gate_up_kernel", 0, 1)) == "product"


def test_a_kernel_counts_from_where_those_ahead_have_ended() -> None:
    events = [
        event(STEP_END, 0, 10),
        event("_add_norm", 12, 20, rows=256),
        # Started early, and waited.
        event("attend_items", 15, 50),
        {**event("Memset", 50, 51), "cat": "gpu_memset"},
        event(STEP_END, 53, 60),
        event("of another stream", 0, 90, stream=9),
        {"ph": "M", "name": "no work"},
    ]
    (step,) = step_shares(events)
    assert (step.num_rows, step.length) == (256, 50)
    parts = {"gaps": 4, "norm": 8, "attention": 30, "copy": 1, "sampling": 7}
    assert dict(step.parts) == parts
    (line,) = by_rows([step], num_layers=2)
    assert (line["rows"], line["steps"], line["ms a step"]) == (256, 1, 0.05)
    assert line["attention"] == 15


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 9)), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_the_parts_of_a_step_add_up_to_it(steps: list[list[tuple[int, int]]]) -> None:
    events, now = [event(STEP_END, 0, 1)], 1.0
    for step in steps:
        for number, (wait, length) in enumerate(step):
            name = STEP_END if number == len(step) - 1 else "nvjet"
            start = max(events[-1]["ts"], now + wait)
            events.append(event(name, start, start + length))
            now = max(now, start + length)
    shares = step_shares(events)
    assert len(shares) == len(steps)
    for share in shares:
        assert sum(share.parts.values()) == pytest.approx(share.length)
    assert sum(share.length for share in shares) == pytest.approx(now - 1.0)


def test_nothing_profiled_gives_nothing() -> None:
    assert step_shares([]) == []
    assert by_rows([], num_layers=2) == []
