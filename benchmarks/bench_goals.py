"""Every goal of the GPU engine in one run: what was measured, the goal, and whether it holds.

    python -m benchmarks.bench_goals [--parts check,twins,step,cases,trace,registered,loads,base]

check       answers and logits against the torch reference (gpu_engine_check)
twins       every kernel of mixed traffic beside its torch twin (gpu_twin_check)
step        decode steps against the roofline, answers against transformers' (bench_step)
cases       what LoRA adds to a layer in nine batches, beside peers with --peers (bench_step)
trace       8 and 1,000 adapters against the base (bench_trace), as are the next three
registered  thousands of registered adapters against a hundred
loads       adapters that come from host memory, and what running streams feel of it
base        base requests, LoRA on against off

Each part is a program by itself, whose tables and JSON lie beside the summary. A part that fails or
takes longer than --limit is said so, and the others run. Takes some 15 minutes on an H200, for
whose memory and Llama-3.1-8B's shapes the goals are meant.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_report import (
    Section,
    add_output_options,
    draw,
    names,
    peers_folder,
    start_report,
)
from benchmarks.gpu_engine_check import DIFFER, RELATIVE
from benchmarks.gpu_twin_check import ERROR
from benchmarks.machine import describe_machine
from benchmarks.report import Table

Sections = list[dict[str, Any]]
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    goal: float
    is_most: bool = False
    """The goal is the most that it may be; else the least."""

    @property
    def holds(self) -> bool:
        return self.value <= self.goal if self.is_most else self.value >= self.goal

    def row(self) -> dict[str, object]:
        sign = "<=" if self.is_most else ">="
        holds = "yes" if self.holds else "no"
        return {
            "figure": self.name,
            "measured": self.value,
            "goal": f"{sign} {self.goal:g}",
            "holds": holds,
        }


def step_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, "base / roofline"):
        found.append(Figure(f"{row['batch']} rows, of the roofline", row["base / roofline"], 0.80))
    for row in rows_with(sections, "system"):
        if row["system"] == "loramux":
            found.append(Figure("whole answers / transformers", row["ratio"], 7))
    return found


def case_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, "goal us"):
        name = f"{row['rows']} rows, {row['adapters']} adapters on {row['sites']}"
        found.append(Figure(f"{name}, us a layer", row["LoRA us a layer"], row["goal us"], True))
        peers = [n for n in row if n.endswith(" added") and n != "ours, kernels added"]
        theirs = [row[peer] for peer in peers if row[peer] is not None]
        if theirs:
            figure = Figure(f"{name}, / best peer", row["LoRA us a layer"] / min(theirs), 1, True)
            found.append(figure)
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
        for row in section["rows"][1:-1]:  # The last is the first again.
            found.append(Figure(f"{row['run']} {column}", row[column], 0.95))
    return found


def load_figures(sections: Sections) -> list[Figure]:
    found = []
    for row in rows_with(sections, "schedulable P50 ms"):
        name = f"{row['MB']:.0f} MB, {row['engine']}"
        if row["engine"] == "idle":
            for share in ("P50", "P99"):
                figure = Figure(f"{name}, {share} ms", row[f"schedulable {share} ms"], 3, True)
                found.append(figure)
        elif row["engine"].endswith(" 1 loads/s"):
            column = "P99 / without loads"
            found.append(Figure(f"{name}, inter-token {column}", row[column], 1.05, True))
    return found


def base_figures(sections: Sections) -> list[Figure]:
    rows = [row for row in rows_with(sections, "run") if row["run"] == "on / off"]
    return [Figure("base requests, LoRA on / off", row["output tok/s"], 0.99) for row in rows]


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


def twin_figures(sections: Sections) -> list[Figure]:
    return [
        Figure(f"{section['title']}: {row['kernel']}", row[ERROR], row["limit"], True)
        for section in sections
        for row in rows_with([section], ERROR)
    ]


def rows_with(sections: Sections, column: str) -> list[dict[str, Any]]:
    rows = (row for section in sections for row in section["rows"])
    return [row for row in rows if row.get(column) is not None]


@dataclass(frozen=True, slots=True)
class Part:
    program: str
    arguments: list[str]
    figures: Callable[[Sections], list[Figure]]


PARTS = {
    "check": Part("gpu_engine_check", ["--parts", "logits,tokens"], check_figures),
    "twins": Part("gpu_twin_check", [], twin_figures),
    "step": Part("bench_step", ["--transformers"], step_figures),
    "cases": Part("bench_step", ["--cases", "--context", "128"], case_figures),
    "trace": Part("bench_trace", ["--scenarios", "many,few", "--requests", "2048"], trace_figures),
    "registered": Part(
        "bench_trace", ["--scenarios", "registered", "--requests", "1024"], registered_figures
    ),
    "loads": Part("bench_trace", ["--scenarios", "loads"], load_figures),
    "base": Part("bench_trace", ["--scenarios", "base", "--requests", "1024"], base_figures),
}


def part_words(text: str) -> tuple[str, list[str]]:
    """An argument such as 'step=--steps 128'."""
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
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of a part")
    parser.add_argument(
        "--peers", type=peers_folder, metavar="FOLDER", help="as for bench step --cases"
    )
    parser.add_argument("--trained", type=Path, metavar="GGUF", help="logits of SmolLM2, too")
    parser.add_argument(
        "--with",
        dest="extra",
        type=part_words,
        action="append",
        default=[],
        metavar="PART=ARGUMENTS",
        help="more arguments for a part: --with 'step=--steps 128'",
    )
    add_output_options(parser)
    return parser


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Of each part that is wanted, without what Python needs to run it."""
    found = {}
    extra = dict(arguments.extra)
    given = {"cases": ("--peers", arguments.peers), "check": ("--model", arguments.trained)}
    for name in arguments.parts:
        words = list(PARTS[name].arguments)
        option, path = given.get(name, ("", None))
        if path is not None:
            words += [option, str(path.resolve())]
        found[name] = [*words, *extra.get(name, [])]
    return found


def run_part(name: str, words: list[str], *, out: Path, file_name: str, limit_s: float) -> str:
    """An empty text, or why there are no figures."""
    program = f"benchmarks.{PARTS[name].program}"
    command = [*(sys.executable, "-m", program), *words, "--out", str(out), "--name", file_name]
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:g} s (--limit)"
    return "" if status == 0 else f"ended with status {status}; its output says why"


def part_section(name: str, record: Path, problem: str, seconds: float) -> Section:
    """What the part has written before it failed counts, too."""
    sections = json.loads(record.read_text())["sections"] if record.is_file() else []
    rows: Table = [figure.row() for figure in PARTS[name].figures(sections)]
    if problem or not rows:
        problem = problem or "it made no table"
        rows.append({"figure": f"{name}: {problem}", "measured": None, "goal": "", "holds": "no"})
    notes = (f"{seconds:.0f} s; tables and command: {record.with_suffix('.md').name}",)
    return Section(title=name, rows=rows, notes=notes)


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.plot_from is not None:
        draw(arguments.plot_from)
        return
    wanted = commands(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("no NVIDIA GPU: figures of a small model on this CPU, for which no goal is meant")
    arguments.out = arguments.out.resolve()
    out = start_report("goals", arguments, describe_machine("bfloat16", device))
    is_whole = True
    for name, words in wanted.items():
        print(f"\n==> {name}", flush=True)
        file_name = f"{out.name}-{name}"
        record = arguments.out / f"{file_name}.json"
        record.unlink(missing_ok=True)
        began = time.perf_counter()
        problem = run_part(
            name, words, out=arguments.out, file_name=file_name, limit_s=arguments.limit
        )
        is_whole &= not problem
        out.add(part_section(name, record, problem, time.perf_counter() - began))
    rows = [row for section in out.sections for row in section.rows]
    num_held = sum(row["holds"] == "yes" for row in rows)
    print(f"\n{num_held} of {len(rows)} hold; written: {out.path('md')}", flush=True)
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()
