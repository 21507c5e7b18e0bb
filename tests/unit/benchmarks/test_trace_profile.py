"""Profiles of GPU steps from the events of a Chrome trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import loramux
from benchmarks.studies.trace_profile import (
    KINDS,
    LAST_OF_STEP,
    LIBRARY_KERNELS,
    by_tokens,
    kind_of,
    step_profiles,
)

STEP_END = "_choose"


def event(name: str, start: float, end: float, tokens: int = 1, stream: int = 7) -> dict[str, Any]:
    args = {"stream": stream, "grid": [tokens, 1, 1]}
    facts = {"ph": "X", "cat": "kernel", "name": name, "args": args}
    return {**facts, "ts": start, "dur": end - start}


def test_kernels_have_a_kind_by_their_name() -> None:
    kinds = {
        "swiglu_kernel": "GEMM",
        "expand_swiglu_kernel": "expand",
        "activate_tiles_kernel": "SwiGLU",
        "nvjet_tst_128x64": "GEMM",
        "_copy_block": "other",
    }
    assert {name: kind_of(event(name, 0, 1)) for name in kinds} == kinds


def test_the_names_are_those_of_triton_kernels() -> None:
    folder = Path(loramux.__file__).parent / "kernels" / "gpu"
    source = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    names = {*KINDS, *LAST_OF_STEP} - {*LIBRARY_KERNELS}
    kernels = re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", source)
    assert [name for name in names if not any(name in kernel for kernel in kernels)] == []


def test_a_kernel_counts_from_the_end_of_all_earlier_kernels() -> None:
    events = [
        event(STEP_END, 0, 10),
        event("_add_norm", 12, 20, tokens=256),
        # Launched under PDL, waits until 20.
        event("attend_items", 15, 50),
        {**event("Memset", 50, 51), "cat": "gpu_memset"},
        event(STEP_END, 53, 60),
        event("of another stream", 0, 90, stream=9),
        {"ph": "M", "name": "metadata"},
    ]
    (step,) = step_profiles(events)
    assert (step.num_tokens, step.length) == (256, 50)
    parts = {"gaps": 4, "norm": 8, "attention": 30, "copy": 1, "sampling": 7}
    assert dict(step.parts) == parts
    (row,) = by_tokens([step], num_layers=2)
    assert (row["tokens"], row["steps"], row["step ms"]) == (256, 1, 0.05)
    assert row["attention"] == 15


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 9)), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_the_parts_of_a_step_add_up_to_its_length(steps: list[list[tuple[int, int]]]) -> None:
    events, now = [event(STEP_END, 0, 1)], 1.0
    for step in steps:
        for number, (wait, length) in enumerate(step):
            name = STEP_END if number == len(step) - 1 else "nvjet"
            start = max(events[-1]["ts"], now + wait)
            events.append(event(name, start, start + length))
            now = max(now, start + length)
    profiles = step_profiles(events)
    assert len(profiles) == len(steps)
    for profile in profiles:
        assert sum(profile.parts.values()) == pytest.approx(profile.length)
    assert sum(profile.length for profile in profiles) == pytest.approx(now - 1.0)


def test_no_events_give_no_steps() -> None:
    assert step_profiles([]) == []
    assert by_tokens([], num_layers=2) == []
