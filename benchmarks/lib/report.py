"""Reports of the benchmark programs: Markdown tables, a JSON record, and a plot of both."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.plots import NO_MATPLOTLIB, plot_record

OUT = Path("benchmarks") / "out"
"""In the working directory."""
Table = list[dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart of a plot; values that are None are left out."""

    title: str
    x_label: str
    y_label: str
    x: list[str]
    series: dict[str, list[float | None]]
    kind: str = "bars"
    """Either "bars" or "lines"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of a report with its notes and charts."""

    title: str
    rows: Table
    notes: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()
    name: str = ""
    """A key for programs that read the record."""


@dataclass(slots=True, kw_only=True)
class ReportWriter:
    """Print and write each section as soon as it is measured: an aborted run keeps its data."""

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
        """Print the paths of the report, and draw the plot if there are charts and matplotlib."""
        print(f"\nwritten: {self.path('md')}\nwritten: {self.path('json')}")
        if any(section.panels for section in self.sections):
            draw(self.path("json"))

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.name}.{ending}"

    def record(self) -> dict[str, Any]:
        return {
            "date": datetime.date.today().isoformat(),
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
    lines = [f"## {section.title}", "", *markdown(section.rows)]
    for note in section.notes:
        lines += ["", note]
    return lines


def markdown(rows: Table) -> list[str]:
    """Return the lines of a Markdown table whose columns are the union of all rows' columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in rows]


def column(rows: Table, name: str) -> list[float | None]:
    """Return a column's numbers for a chart, None for other values."""
    values = [row.get(name) for row in rows]
    return [float(value) if isinstance(value, int | float) else None for value in values]


def cell(value: object) -> str:
    """Format a table cell: a float gets about four significant digits, None a dash."""
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
    """Plot a JSON record beside it; return None if matplotlib is not installed."""
    target = record_file.with_suffix(".png")
    if not plot_record(json.loads(record_file.read_text()), target):
        print(f"no plot: {NO_MATPLOTLIB} Then: python -m benchmarks.lib.plots {record_file}")
        return None
    print(f"written: {target}")
    return target


def add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--out", type=Path, default=OUT, help="folder for the report's files")
    group.add_argument("--name", help="file name without suffix (default: date and benchmark)")
    group.add_argument("--plot-from", type=Path, metavar="JSON", help="plot a record, run nothing")


def parse_arguments(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line; with --plot-from, draw that record and exit."""
    add_output_options(parser)
    arguments = parser.parse_args(words)
    if arguments.plot_from is not None:
        draw(arguments.plot_from)
        sys.exit(0)
    return arguments


def start_report(
    benchmark: str, arguments: argparse.Namespace, machine: dict[str, str]
) -> ReportWriter:
    date = datetime.date.today().isoformat()
    print("; ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    return ReportWriter(
        name=arguments.name or f"{date}-{benchmark}",
        folder=arguments.out,
        command=shlex.join(["python", *_program(), *sys.argv[1:]]),
        machine=machine,
        settings=dict(vars(arguments)),
    )


def write_table(
    benchmark: str, rows: Table, machine: dict[str, str], arguments: argparse.Namespace
) -> None:
    """Write a report that consists of a single table."""
    out = start_report(benchmark, arguments, machine)
    out.add(Section(title=benchmark, rows=rows))
    out.finish()


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [sys.argv[0]] if spec is None else ["-m", spec.name]


def numbers(text: str) -> list[int]:
    """Parse an option such as 1,32,128."""
    return [int(part) for part in text.split(",") if part]


def peers_folder(text: str) -> Path:
    """Parse --peers, and reject a folder without peers before anything is timed."""
    if not (folder := Path(text)).joinpath("lora_peers.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{folder} has no lora_peers.py; benchmarks/lib/gpu_lora.py describes that file"
        )
    return folder


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the parser of an option such as few,many, which rejects unknown names."""

    def parse(text: str) -> list[str]:
        found = [part for part in text.split(",") if part]
        unknown = [part for part in found if part not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: valid values are {', '.join(known)}"
            )
        return found

    return parse
