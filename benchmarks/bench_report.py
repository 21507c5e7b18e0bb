"""What a benchmark leaves behind: tables for people, JSON for programs, and a plot of it."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plots import NO_MATPLOTLIB, plot_record
from benchmarks.report import RESULTS, Table, markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture of a plot; a value that is None is left out."""

    title: str
    x_label: str
    y_label: str
    x: list[str]
    series: dict[str, list[float | None]]
    kind: str = "bars"
    """bars or lines"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    rows: Table
    notes: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()


@dataclass(slots=True, kw_only=True)
class ReportWriter:
    """Every section is printed and written at once: a run that is cut short keeps what it has."""

    name: str
    folder: Path
    command: str
    machine: dict[str, str]
    settings: dict[str, Any]
    sections: list[Section] = field(default_factory=list)

    def add(self, section: Section) -> None:
        self.sections.append(section)
        print("\n" + "\n".join(section_lines(section)), flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path("md").write_text("\n".join(self._text()))
        self.path("json").write_text(json.dumps(self.record(), indent=1, default=str) + "\n")

    def finish(self) -> None:
        """Says where everything is, and draws the plot where matplotlib is there to draw it."""
        print(f"\nwritten: {self.path('md')}\nwritten: {self.path('json')}")
        draw(self.path("json"))

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.name}.{ending}"

    def record(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "command": self.command,
            "machine": self.machine,
            "settings": self.settings,
            "sections": [dataclasses.asdict(section) for section in self.sections],
        }

    def _text(self) -> list[str]:
        lines = [f"# {self.name}", "", f"Command: `{self.command}`", ""]
        lines += [f"- {key}: {value}" for key, value in self.machine.items()]
        for section in self.sections:
            lines += ["", *section_lines(section)]
        return [*lines, ""]


def section_lines(section: Section) -> list[str]:
    shown = [{name: cell(value) for name, value in row.items()} for row in full(section.rows)]
    lines = [f"## {section.title}", "", *markdown(shown)]
    for note in section.notes:
        lines += ["", note]
    return lines


def full(rows: Table) -> Table:
    """Every row has every column, in the order in which they first come."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def cell(value: object) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    num_digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:.{num_digits}f}"


def draw(record_file: Path) -> Path | None:
    """The plot of a JSON file, beside it; None: matplotlib is not installed."""
    target = record_file.with_suffix(".png")
    if not plot_record(json.loads(record_file.read_text()), target):
        print(f"no plot: {NO_MATPLOTLIB} Then: python -m benchmarks.plots {record_file}")
        return None
    print(f"written: {target}")
    return target


def add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--out", type=Path, default=RESULTS, help="folder of the files")
    group.add_argument("--name", help="of the files, without ending; default: date and benchmark")
    group.add_argument("--plot-from", type=Path, metavar="JSON", help="draw that file, run nothing")


def start_report(
    benchmark: str, arguments: argparse.Namespace, machine: dict[str, str]
) -> ReportWriter:
    date = datetime.date.today().isoformat()
    words = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    print("; ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    return ReportWriter(
        name=arguments.name or f"{date}-bench-{benchmark}",
        folder=arguments.out,
        command=shlex.join(words),
        machine=machine,
        settings=dict(vars(arguments)),
    )


def numbers(text: str) -> list[int]:
    """An argument such as 1,32,128."""
    return [int(part) for part in text.split(",") if part]


def peers_folder(text: str) -> Path:
    """The type of --peers; refuses a folder without them before anything is timed."""
    if not (folder := Path(text)).joinpath("lora_peers.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{folder} has no lora_peers.py: see benchmarks/gpu_lora_kernels.py for what it holds"
        )
    return folder


def names(known: Sequence[str]) -> Any:
    """The type of an argument such as few,many; refuses what is not known."""

    def parse(text: str) -> list[str]:
        found = [part for part in text.split(",") if part]
        unknown = [part for part in found if part not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return found

    return parse
