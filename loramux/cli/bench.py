"""`loramux bench`: runs the programs of the repository's benchmarks/ folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

import loramux

BENCHMARKS = Path(loramux.__file__).resolve().parents[1] / "benchmarks"
# Everything after the command's name, --help included, belongs to the benchmark program.
PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure loramux on this machine."""


@app.command(context_settings=PASS_THROUGH)
def engine(context: typer.Context) -> None:
    """Tokens per second of the engine on the base and on 1, 8 and 32 adapters."""
    raise typer.Exit(run_benchmark(BENCHMARKS / "engine_throughput.py", context.args))


def run_benchmark(program: Path, arguments: list[str]) -> int:
    """The program's exit status. It has a process to itself, so that nothing else is measured."""
    if program.is_file():
        return subprocess.run([sys.executable, str(program), *arguments]).returncode
    typer.secho(
        f"{program.name} is not part of the installed package. "
        "Get loramux's repository and run `make bench` there.",
        fg=typer.colors.RED,
        err=True,
    )
    return 1
