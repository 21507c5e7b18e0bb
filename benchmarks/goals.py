"""Measure every goal of the GPU engine: the measured figure, the goal, and whether it holds.

    python -m benchmarks.goals [--quick] [--parts check,reference,step,cases,trace,...]

check       tokens and logits against the torch reference (tests/gpu/engine_check.py)
reference   every kernel call of mixed traffic against torch (tests/gpu/reference_check.py)
step        decode steps against the roofline, throughput against transformers (benchmarks/step.py)
cases       LoRA overhead per layer in nine batches, with --peers beside other servers' kernels
trace       throughput with 8 and with 1,000 adapters against base-only (benchmarks/trace.py)
registered  throughput with thousands of registered adapters against a hundred
loads       time until an adapter in host memory is schedulable; inter-token latency meanwhile
base        throughput of base requests, LoRA on against off
structured  throughput with half of the rows constrained; compile time of a schema
http        the server's start phase by phase; tokens/s over HTTP against the engine's own

Each part runs as a process of its own and writes its tables and JSON record beside the summary. A
part that fails or exceeds --limit is reported, and the others run. The goals are meant for an H200
and the shapes of Llama-3.1-8B: about 20 minutes, or about 10 with --quick, plus two minutes for the
kernels' first compilation. --quick measures fewer steps and requests, so its figures are noisier;
compare them only with other --quick figures of the same GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import (
    Section,
    Table,
    names,
    parse_arguments,
    peers_folder,
    start_report,
)
from benchmarks.structured import COMPILE, FREE
from tests.gpu.engine_check import DIFFER, RELATIVE
from tests.gpu.reference_check import ERROR

Sections = list[dict[str, Any]]
ROOT = Path(__file__).resolve().parents[1]
LOADING_WEIGHTS = "Loading weights"
"""The phase of a server's start that reads the weights."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its goal, which is a lower bound unless `is_upper_bound`."""

    name: str
    value: float
    goal: float
    is_upper_bound: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.goal if self.is_upper_bound else self.value >= self.goal

    def row(self) -> dict[str, object]:
        sign = "<=" if self.is_upper_bound else ">="
        return {
            "figure": self.name,
            "measured": self.value,
            "goal": f"{sign} {self.goal:g}",
            "holds": "yes" if self.holds else "no",
        }


def step_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, "base / roofline"):
        name = f"{row['batch']} tokens, of the roofline"
        found.append(Figure(name, row["base / roofline"], 0.80))
    for row in rows_with(sections, "system"):
        if row["system"] == "loramux":
            found.append(Figure("throughput / transformers", row["ratio"], 7))
    return found


def case_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, "goal us"):
        name = f"{row['tokens']} tokens, {row['adapters']} adapters on {row['sites']}"
        lora_us = row["LoRA us per layer"]
        found.append(Figure(f"{name}, us per layer", lora_us, row["goal us"], True))
        peers = [n for n in row if n.endswith(" added") and n != "ours, kernels added"]
        peers_us = [row[peer] for peer in peers if isinstance(row[peer], int | float)]
        if peers_us:
            found.append(Figure(f"{name}, / best peer", lora_us / min(peers_us), 1, True))
    return found


def trace_figures(sections: Sections) -> list[Figure]:
    found = []
    for section in sections:
        goal = 0.85 if section["title"].startswith("S-LoRA") else 0.95
        for row in rows_with([section], "/ base-only"):
            if row["run"].startswith("LoRA"):
                for by, column in (("tokens", "/ base-only"), ("requests", "requests / base-only")):
                    found.append(Figure(f"{section['title']}, {by} / base", row[column], goal))
    return found


def registered_figures(sections: Sections) -> list[Figure]:
    found = []
    for section in sections:
        first = section["rows"][0]
        column = next(name for name in first if name.startswith("/ "))
        for row in section["rows"][1:-1]:  # The last row repeats the first size.
            found.append(Figure(f"{row['run']} {column}", row[column], 0.95))
    return found


def load_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, "schedulable P50 ms"):
        name = f"{row['MB']:.0f} MB, {row['engine']}"
        if row["engine"] == "idle":
            for share in ("P50", "P99"):
                value = row[f"schedulable {share} ms"]
                found.append(Figure(f"{name}, {share} ms", value, 3, True))
        elif row["engine"].endswith(" 1 loads/s"):
            column = "P99 / without loads"
            found.append(Figure(f"{name}, inter-token {column}", row[column], 1.05, True))
    return found


def base_figures(sections: Sections) -> list[Figure]:
    rows = [row for row in rows_with(sections, "run") if row["run"] == "on / off"]
    return [Figure("base requests, LoRA on / off", row["output tok/s"], 0.99) for row in rows]


def structured_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, COMPILE):
        found.append(Figure("compile a schema of 24 fields, ms", row[COMPILE], 10, True))
    for row in rows_with(sections, FREE):
        if row["constrained"] == "half":
            found.append(Figure("half of the rows constrained / none", row[FREE], 0.95))
    return found


def check_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, DIFFER):
        found.append(Figure(f"{row['engine']}: {DIFFER}", row[DIFFER], 0, True))
    for section in sections:
        for row in rows_with([section], RELATIVE):
            if row["logits"].startswith("engine"):
                goal = 1e-4 if row["logits"].endswith("float32") else 2e-2
                name = f"{section['title']}: {row['logits']}"
                found.append(Figure(name, row[RELATIVE], goal, True))
    return found


def reference_figures(sections: Sections) -> list[Figure]:
    return [
        Figure(f"{section['title']}: {row['kernel']}", row[ERROR], row["limit"], True)
        for section in sections
        for row in rows_with([section], ERROR)
    ]


def http_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, "streams / offline"):
        name = f"{row['clients']} clients, {row['adapters']} adapters"
        for column in ("streams / offline", "whole / offline"):
            found.append(Figure(f"{name}, {column}", row[column], 0.95))
    phases = rows_with(sections, "phase")
    for total in (row for row in phases if row["phase"] == "total"):
        # Phases that run at the same time share a row: "Loading weights, Compiling kernels".
        reading = [row["warm s"] or 0.0 for row in phases if LOADING_WEIGHTS in row["phase"]]
        found.append(Figure("first answer with empty caches, s", total["cold s"], 45, True))
        name = "first answer with caches, without reading the weights, s"
        found.append(Figure(name, total["warm s"] - sum(reading), 12, True))
    return found


def rows_with(sections: Sections, column: str) -> list[dict[str, Any]]:
    rows = (row for section in sections for row in section["rows"])
    return [row for row in rows if row.get(column) is not None]


@dataclass(frozen=True, slots=True)
class Part:
    """A program with its options, and the figures to take from its record."""

    program: str
    options: str
    quick: str
    """Options that replace `options` with --quick."""
    figures: Callable[[Sections], list[Figure]]
    scenarios: tuple[str, ...] = ()
    """Scenarios of benchmarks.trace, whose sections bear these names."""

    def words(self, *, is_quick: bool) -> list[str]:
        return shlex.split(self.quick if is_quick else self.options)

    def sections_of(self, record: Path) -> Sections:
        if not record.is_file():
            return []
        sections: Sections = json.loads(record.read_text())["sections"]
        if not self.scenarios:
            return sections
        return [section for section in sections if section["name"] in self.scenarios]


TRACE = "benchmarks.trace"
QUICK_TRACE = "--requests 768 --registered 100,2000 --loads 40 --load-rates 1 --base-repeats 1"
PARTS = {
    "check": Part(
        "tests.gpu.engine_check",
        "--parts logits,tokens",
        "--parts logits,tokens --requests 60",
        check_figures,
    ),
    "reference": Part("tests.gpu.reference_check", "", "--requests 30", reference_figures),
    "step": Part(
        "benchmarks.step",
        "--transformers",
        "--transformers --generate 32,128,64 --steps 32",
        step_figures,
    ),
    "cases": Part(
        "benchmarks.step",
        "--cases --context 128",
        "--cases --context 128 --rounds 1 --steps 32",
        case_figures,
    ),
    "trace": Part(TRACE, "--requests 2048", QUICK_TRACE, trace_figures, ("many", "few")),
    "registered": Part(TRACE, "--requests 1024", QUICK_TRACE, registered_figures, ("registered",)),
    "loads": Part(TRACE, "", QUICK_TRACE, load_figures, ("loads",)),
    "base": Part(TRACE, "--requests 1024", QUICK_TRACE, base_figures, ("base",)),
    "structured": Part("benchmarks.structured", "", "--rounds 2 --tokens 64", structured_figures),
    "http": Part("benchmarks.http", "", "--quick", http_figures),
}


@dataclass(frozen=True, slots=True)
class Process:
    """One program to run, for one part or for several that have the same options."""

    parts: tuple[str, ...]
    words: tuple[str, ...]
    """The module's name and its options."""


def part_words(text: str) -> tuple[str, list[str]]:
    """Parse an option such as 'step=--steps 128'."""
    name, sign, words = text.partition("=")
    if not sign or name not in PARTS:
        parts = ", ".join(PARTS)
        raise argparse.ArgumentTypeError(f"{text!r} is not PART=ARGUMENTS; parts are {parts}")
    return name, shlex.split(words)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench goals", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", type=names(list(PARTS)), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer steps and requests")
    parser.add_argument(
        "--limit", type=float, default=600, metavar="SECONDS", help="time limit of a part"
    )
    parser.add_argument(
        "--peers", type=peers_folder, metavar="FOLDER", help="peers for bench step --cases"
    )
    parser.add_argument(
        "--trained", type=Path, metavar="GGUF", help="compare the logits of SmolLM2 as well"
    )
    parser.add_argument(
        "--with",
        dest="extra",
        type=part_words,
        action="append",
        default=[],
        metavar="PART=ARGUMENTS",
        help="more arguments for a part: --with 'step=--steps 128'",
    )
    return parser


def processes(arguments: argparse.Namespace) -> list[Process]:
    """Return the programs to run.

    With --quick, parts of the trace program with the same options share a process and its engine.
    """
    extra = dict(arguments.extra)
    given = {"cases": ("--peers", arguments.peers), "check": ("--model", arguments.trained)}
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in arguments.parts:
        part = PARTS[name]
        words = [part.program, *part.words(is_quick=arguments.quick)]
        option, path = given.get(name, ("", None))
        if path is not None:
            words += [option, str(path.resolve())]
        words += extra.get(name, [])
        group = "trace" if arguments.quick and part.scenarios else name
        groups.setdefault((group, tuple(words)), []).append(name)
    found = []
    for (_, shared), parts in groups.items():
        words = list(shared)
        scenarios = [scenario for name in parts for scenario in PARTS[name].scenarios]
        words += ["--scenarios", ",".join(scenarios)] if scenarios else []
        found.append(Process(tuple(parts), tuple(words)))
    return found


def run_process(process: Process, *, out: Path, file_name: str, limit_s: float) -> str:
    """Run the program; return an empty text, or the reason for missing figures."""
    command = [sys.executable, "-m", *process.words, "--out", str(out), "--name", file_name]
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:g} s (--limit)"
    return "" if status == 0 else f"ended with status {status}; see its output"


def part_sections(
    process: Process, record: Path, problem: str, seconds: float
) -> Iterable[Section]:
    """Make a summary table for each part, including what it wrote before it failed."""
    for name in process.parts:
        part = PARTS[name]
        rows: Table = [figure.row() for figure in part.figures(part.sections_of(record))]
        if problem or not rows:
            figure = f"{name}: {problem or 'it made no table'}"
            rows.append({"figure": figure, "measured": None, "goal": "", "holds": "no"})
        shared = "" if len(process.parts) == 1 else f" for {', '.join(process.parts)}"
        note = f"{seconds:.0f} s{shared}; tables and command: {record.with_suffix('.md').name}"
        yield Section(title=name, rows=rows, notes=(note,))


def main() -> None:
    arguments = parse_arguments(make_parser())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("no NVIDIA GPU: a small model on this CPU, for which the goals are not meant")
    if arguments.quick:
        print("--quick: fewer steps and requests, noisier figures")
    arguments.out = arguments.out.resolve()
    mode = "goals-quick" if arguments.quick else "goals"
    out = start_report(mode, arguments, describe_machine("bfloat16", device))
    is_complete = True
    for process in processes(arguments):
        print(f"\n==> {', '.join(process.parts)}", flush=True)
        file_name = f"{out.name}-{'-'.join(process.parts)}"
        record = arguments.out / f"{file_name}.json"
        record.unlink(missing_ok=True)
        began = time.perf_counter()
        limit_s = arguments.limit * len(process.parts)
        problem = run_process(process, out=arguments.out, file_name=file_name, limit_s=limit_s)
        is_complete &= not problem
        for section in part_sections(process, record, problem, time.perf_counter() - began):
            out.add(section)
    rows = [row for section in out.sections for row in section.rows]
    num_held = sum(row["holds"] == "yes" for row in rows)
    print(f"\n{num_held} of {len(rows)} hold; written: {out.path('md')}", flush=True)
    sys.exit(not is_complete)


if __name__ == "__main__":
    main()
