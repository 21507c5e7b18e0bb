"""`loramux bench`: run the programs of the repository's benchmarks/ folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

import loramux

ROOT = Path(loramux.__file__).resolve().parents[1]
# Every argument after the command's name, including --help, belongs to the benchmark program.
PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
PROGRAMS = {
    "engine": ("benchmarks.engine", "Engine throughput on the base and on 1, 8 and 32 adapters."),
    "http": ("benchmarks.http", "Start of the server, and tokens/s over HTTP and offline."),
    "step": (
        "benchmarks.step",
        "Decode step by batch, adapters and ranks, against the roofline.",
    ),
    "trace": ("benchmarks.trace", "S-LoRA and Punica workloads on the engine, against base-only."),
    "many-adapters": (
        "benchmarks.many_adapters",
        "Start, restart and token time with thousands of adapters, against a few.",
    ),
    "routing": (
        "benchmarks.routing",
        "Simulate a fleet of up to 1,000 replicas: hit rates and waits of routing policies.",
    ),
    "router": (
        "benchmarks.router",
        "The router with real processes: policies, and overhead against no router.",
    ),
    "kernels": ("benchmarks.kernels", "LoRA and attention kernels alone, against other servers'."),
    "structured": (
        "benchmarks.structured",
        "Throughput of a batch with constrained rows, and compile time of a schema.",
    ),
    "images": (
        "benchmarks.images",
        "Seconds per image with different adapters in one batch, beside diffusers.",
    ),
    "goals": ("benchmarks.goals", "Every goal of the GPU engine: measured figure, goal, verdict."),
    "plot": ("benchmarks.lib.plots", "Plot the JSON record of a benchmark."),
    "cache-simulation": (
        "benchmarks.studies.cache_simulation",
        "Study: eviction policies on simulated traces.",
    ),
    "fairness": ("benchmarks.studies.fairness", "Study: waits beside an adapter that floods."),
    "load-interference": (
        "benchmarks.studies.load_interference",
        "Study: inter-token latency while adapters load from disk.",
    ),
    "merge-mode": ("benchmarks.studies.merge_mode", "Study: adapter merged into the weights."),
    "page-cost": ("benchmarks.studies.page_cost", "Study: cost of open web pages."),
    "receipt-overhead": ("benchmarks.studies.receipt_overhead", "Study: cost of receipts."),
    "guard-overhead": ("benchmarks.studies.guard_overhead", "Study: cost of keys and limits."),
    "connection-storm": (
        "benchmarks.studies.connection_storm",
        "Study: streams in a storm of connections.",
    ),
    "slow-streams": ("benchmarks.studies.slow_streams", "Study: clients that do not read."),
    "tier-trace": ("benchmarks.studies.tier_trace", "Study: thousands of adapters in three tiers."),
    "trace-profile": ("benchmarks.studies.trace_profile", "Study: GPU time of a step by kernel."),
}
"""Command: (module, help)."""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure loramux on this machine."""


def add_command(name: str, module: str, text: str) -> None:
    @app.command(name, help=text, context_settings=PASS_THROUGH)
    def command(context: typer.Context) -> None:
        raise typer.Exit(run_benchmark(module, context.args))


for _name, (_module, _text) in PROGRAMS.items():
    add_command(_name, _module, _text)


def run_benchmark(module: str, arguments: list[str], root: Path = ROOT) -> int:
    """Run a program in a process of its own and return its exit status."""
    program = root.joinpath(*module.split(".")).with_suffix(".py")
    if program.is_file():
        # The programs import each other as `benchmarks.NAME` and tests/ for server fixtures.
        paths = [str(root), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, env=environment).returncode
    typer.secho(
        f"{module} is not part of the installed package. "
        "Clone loramux's repository and run `make bench` there.",
        fg=typer.colors.RED,
        err=True,
    )
    return 1
