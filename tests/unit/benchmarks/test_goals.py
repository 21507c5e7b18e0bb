"""`loramux bench goals`: its programs on a tiny engine, and the figures of their records."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goals, step
from benchmarks.goals import (
    PARTS,
    Figure,
    Process,
    case_figures,
    load_figures,
    make_parser,
    processes,
    reference_figures,
    trace_figures,
)
from benchmarks.lib.lora_cases import Case
from tests.gpu.reference_check import ERROR

CPU = "--device cpu"
TINY = f"{CPU} --model small --layers 1 --device-memory 64"
TRACE = f"{TINY} --requests 6 --tokens 2,4 --max-sequences 4"
SMALLER = {
    "check": f"{CPU} --requests 3",
    "step": f"{TINY} --batches 1,2 --context 12 --steps 2 --ranks 2 --generate 2,5,3",
    "cases": f"{TINY} --max-sequences 4 --context 4 --steps 1",
    "trace": f"{TRACE} --many 3",
    "registered": f"{TRACE} --registered 2,4,6",
    "loads": f"{TINY} --loads 2 --load-rates 1 --round-s 0.1 --streams 2 --stream-prompt 3",
    "base": f"{TRACE} --many 2",
    "http": f"{CPU} --parts load --model small --clients 1,2 --adapters 1 --input 4 --output 2",
}


def run_goals(arguments: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    words = ["goals", *arguments, "--out", str(folder), "--name", "found"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stopped:
        goals.main()
    return int(stopped.value.code or 0)


def sections_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    record = json.loads((folder / "found.json").read_text())
    return {section["title"]: section["rows"] for section in record["sections"]}


def run_here(process: Process, *, out: Path, file_name: str, limit_s: float) -> str:
    """Run a program in this process instead of in eight that import torch."""
    program = importlib.import_module(process.words[0])
    with pytest.MonkeyPatch.context() as patch:
        words = [*process.words, "--out", str(out), "--name", file_name]
        patch.setattr(sys, "argv", words)
        program.main()
    return ""


# Figures of each part: tokens in two engines, logits in two dtypes; two batches and transformers;
# two cases; two ratios of two traces; two sizes; three figures of two adapters; one ratio; two
# ratios of two numbers of clients on base and adapter.
COUNTS = {
    **{"check": 4, "step": 3, "cases": 2, "trace": 4, "registered": 2, "loads": 6, "base": 1},
    "http": 8,
}


@pytest.mark.slow
def test_every_part_has_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "run_process", run_here)
    cases = [Case(1, "qkvo", "identical", 6), Case(4, "all", "distinct", 1e9)]
    monkeypatch.setattr(step, "CASES", cases)
    extra = [f"--with={name}={words}" for name, words in SMALLER.items()]
    # The part "reference" needs a GPU; test_reference_check.py tests it in the interpreter.
    extra += ["--parts", ",".join(SMALLER)]
    assert run_goals(extra, monkeypatch, tmp_path) == 0
    found = sections_of(tmp_path)
    assert {name: len(rows) for name, rows in found.items()} == COUNTS
    assert all(row["measured"] is not None for rows in found.values() for row in rows)
    tokens = [row for row in found["check"] if "differ" in row["figure"]]
    assert [row["holds"] for row in tokens] == ["yes", "yes"]
    assert found["cases"][1]["holds"] == "yes"
    for name in SMALLER:
        assert (tmp_path / f"found-{name}.md").is_file()


@pytest.mark.slow
def test_parts_that_share_a_process_have_their_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goals, "run_process", run_here)
    parts = ("trace", "registered", "loads", "base")
    words = f"{TRACE} --many 3 --registered 2,4,6 --loads 2 --round-s 0.1 --streams 2"
    extra = [f"--with={name}={words} --stream-prompt 3" for name in parts]
    extra += ["--quick", "--parts", ",".join(parts)]
    assert run_goals(extra, monkeypatch, tmp_path) == 0
    found = sections_of(tmp_path)
    assert {name: len(rows) for name, rows in found.items()} == {n: COUNTS[n] for n in parts}
    assert all(row["measured"] is not None for rows in found.values() for row in rows)
    assert (tmp_path / "found-trace-registered-loads-base.md").is_file()


def test_quick_runs_the_trace_parts_in_one_process() -> None:
    quick = processes(make_parser().parse_args(["--quick"]))
    assert [process.parts for process in quick] == [
        *(("check",), ("reference",), ("step",), ("cases",)),
        ("trace", "registered", "loads", "base"),
        ("structured",),
        ("http",),
    ]
    assert quick[-3].words[-2:] == ("--scenarios", "many,few,registered,loads,base")
    full = processes(make_parser().parse_args([]))
    assert [process.parts for process in full] == [(name,) for name in PARTS]


def test_quick_options_are_options_of_the_programs() -> None:
    for process in processes(make_parser().parse_args(["--quick"])):
        program = importlib.import_module(process.words[0])
        if hasattr(program, "make_parser"):
            program.make_parser().parse_args(process.words[1:])


def test_a_part_takes_its_figures_from_its_own_scenarios(tmp_path: Path) -> None:
    record = tmp_path / "found.json"
    sections = [{"name": "few", "rows": []}, {"name": "base", "rows": []}]
    record.write_text(json.dumps({"sections": sections}))
    assert PARTS["base"].sections_of(record) == sections[1:]
    assert PARTS["step"].sections_of(record) == sections
    assert PARTS["base"].sections_of(tmp_path / "missing.json") == []


@pytest.mark.slow
def test_a_failed_part_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--parts", "cases", "--with", "cases=--nonsense"]
    assert run_goals(wrong, monkeypatch, tmp_path) == 1
    (row,) = sections_of(tmp_path)["cases"]
    assert "status 2" in row["figure"] and row["holds"] == "no"
    assert "0 of 1 hold" in capsys.readouterr().out


def test_a_part_that_exceeds_its_limit_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--parts", "step,trace", "--limit", "0.01"]
    assert run_goals(arguments, monkeypatch, tmp_path) == 1
    found = sections_of(tmp_path)
    assert list(found) == ["step", "trace"]
    assert all("within 0.01 s" in rows[0]["figure"] for rows in found.values())


@pytest.mark.parametrize("wrong", ["steps=--steps 9", "step"])
def test_arguments_for_an_unknown_part_are_rejected(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["goals", "--with", wrong])
    with pytest.raises(SystemExit):
        goals.main()
    assert "is not PART=ARGUMENTS; parts are check, reference, step" in capsys.readouterr().err


def test_a_goal_is_a_lower_or_an_upper_bound() -> None:
    assert Figure("speed", 0.95, 0.95).holds and not Figure("speed", 0.949, 0.95).holds
    assert (
        Figure("time", 6, 6, is_upper_bound=True).holds and not Figure("time", 6.1, 6, True).holds
    )
    assert Figure("time", 6.1, 6, True).row() == {
        **{"figure": "time", "measured": 6.1, "goal": "<= 6", "holds": "no"}
    }


def test_a_case_is_compared_with_the_best_peer() -> None:
    row = {"tokens": 1, "sites": "all", "adapters": 1, "LoRA us per layer": 5.0, "goal us": 12}
    peers = {
        "ours, kernels added": 1.0,
        "vllm added": 20.0,
        "sglang added": 10.0,
        "old added": None,
    }
    own, best = case_figures([{"rows": [{**row, **peers}]}])
    assert own.value == 5.0 and own.is_upper_bound and best.value == 0.5
    assert len(case_figures([{"rows": [row]}])) == 1


def test_the_trace_over_many_adapters_has_a_goal_of_its_own() -> None:
    rows = [
        {"run": "base 1", "/ base-only": 1.0, "requests / base-only": 1.0},
        {"run": "LoRA 1", "/ base-only": 0.9, "requests / base-only": 0.96},
    ]
    sections = [{"title": title, "rows": rows} for title in ("S-LoRA trace: 9", "8 adapters")]
    assert [figure.holds for figure in trace_figures(sections)] == [True, True, False, True]


def test_loads_have_goals_in_an_idle_engine_and_at_one_per_second() -> None:
    times = {"schedulable P50 ms": 1.0, "schedulable P99 ms": 4.0, "P99 / without loads": 1.2}
    engines = ("idle", "32 streams, 0 loads/s", "32 streams, 1 loads/s", "32 streams, 20 loads/s")
    rows = [{"MB": 27.3, "engine": engine, **times} for engine in engines]
    found = load_figures([{"rows": rows}])
    assert [figure.name for figure in found] == [
        *("27 MB, idle, P50 ms", "27 MB, idle, P99 ms"),
        "27 MB, 32 streams, 1 loads/s, inter-token P99 / without loads",
    ]
    assert [figure.holds for figure in found] == [True, False, False]


def test_a_kernel_holds_up_to_its_limit() -> None:
    rows = [
        {"kernel": name, ERROR: error, "limit": 1e-4} for name, error in (("a", 1e-4), ("b", 0.5))
    ]
    figures = reference_figures([{"title": "Kernels", "rows": rows}])
    assert [(figure.name, figure.holds) for figure in figures] == [
        ("Kernels: a", True),
        ("Kernels: b", False),
    ]
