"""Tables for people, and the same as files under benchmarks/results/."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
Table = list[dict[str, object]]


def print_table(table: Table, machine: dict[str, str]) -> None:
    print()
    print("; ".join(f"{key}: {value}" for key, value in machine.items()))
    print("\n".join(markdown(table)))


def markdown(table: Table) -> list[str]:
    names = list(table[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in table]


def write_report(
    name: str, table: Table, machine: dict[str, str], args: argparse.Namespace
) -> None:
    date = datetime.date.today().isoformat()
    command = shlex.join(["python", *_program(), *sys.argv[1:]])
    text = [
        f"# {name}, {date}",
        "",
        f"Command: `{command}`",
        "",
        *(f"- {key}: {value}" for key, value in machine.items()),
        "",
        *markdown(table),
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{date}-{name}.md").write_text("\n".join(text))
    record = {"command": command, "machine": machine, "settings": vars(args), "table": table}
    (RESULTS / f"{date}-{name}.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
    print(f"\nwritten: benchmarks/results/{date}-{name}.md")


def _program() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [f"benchmarks/{Path(sys.argv[0]).name}"] if spec is None else ["-m", spec.name]
