"""`loramux bench`: runs the programs of the repository's benchmarks/ folder."""

from __future__ import annotations

import os
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


@app.command(context_settings=PASS_THROUGH)
def kernels(context: typer.Context) -> None:
    """LoRA and attention kernels by themselves, beside other servers' if they are there."""
    raise typer.Exit(run_benchmark(BENCHMARKS / "bench_kernels.py", context.args))


@app.command(context_settings=PASS_THROUGH)
def step(context: typer.Context) -> None:
    """One decode step by batch, adapters, ranks and sites, beside the machine's roofline."""
    raise typer.Exit(run_benchmark(BENCHMARKS / "bench_step.py", context.args))


@app.command(context_settings=PASS_THROUGH)
def trace(context: typer.Context) -> None:
    """Workloads of S-LoRA and Punica on the whole engine, beside base-only runs."""
    raise typer.Exit(run_benchmark(BENCHMARKS / "bench_trace.py", context.args))


@app.command(context_settings=PASS_THROUGH)
def goals(context: typer.Context) -> None:
    """All that the GPU engine is meant to reach: what was measured, the goal, does it hold."""
    raise typer.Exit(run_benchmark(BENCHMARKS / "bench_goals.py", context.args))


@app.command(context_settings=PASS_THROUGH)
def plot(context: typer.Context) -> None:
    """Draw the JSON file of a benchmark that ran elsewhere."""
    raise typer.Exit(run_benchmark(BENCHMARKS / "plots.py", context.args))


def run_benchmark(program: Path, arguments: list[str]) -> int:
    """The program's exit status. It has a process to itself, so that nothing else is measured."""
    if program.is_file():
        # So that the programs find each other as `benchmarks.NAME`.
        paths = [str(program.parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, str(program), *arguments]
        return subprocess.run(command, env=environment).returncode
    typer.secho(
        f"{program.name} is not part of the installed package. "
        "Get loramux's repository and run `make bench` there.",
        fg=typer.colors.RED,
        err=True,
    )
    return 1
