"""Plan a fleet: hit rates, waits and load of routing policies on a simulated trace.

loramux bench routing --replicas 256 --adapters 100000 --trace flash

It runs the code with which `loramux router` chooses, over simulated replicas. Traces: zipf; drift
(other adapters become popular), flash (one adapter gets 40 % of the requests for a while) and loss
(a replica is killed, its requests go elsewhere).
"""

from __future__ import annotations

import argparse
import time

from benchmarks.lib.fleet_simulation import POLICIES, Costs, Result, Setting, Simulation
from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import (
    Panel,
    Section,
    Table,
    column,
    names,
    parse_arguments,
    start_report,
)

TRACES = ("zipf", "drift", "flash", "loss")
COSTS = {
    "8b": Costs(),
    # Those of the replicas of `bench router`, to compare the simulation with real processes.
    "sleeping": Costs(
        step_s=0.02,
        sequence_s=0,
        token_s=0,
        slots=4,
        host_s=0.004,
        system_tokens=0,
        answer_tokens=8,
    ),
}


def main() -> None:
    arguments = parse_arguments(_parser())
    out = start_report("routing", arguments, describe_machine("none"))
    for trace in arguments.traces:
        setting = _setting(arguments, trace)
        began = time.perf_counter()
        rows = [
            _row(Simulation(policy, setting, COSTS[arguments.costs]).run())
            for policy in arguments.policies
        ]
        seconds = time.perf_counter() - began
        out.add(_section(trace, setting, rows, seconds))
    out.finish()


def _parser() -> argparse.ArgumentParser:
    default = Setting()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in (
        ("replicas", "number of servers"),
        ("adapters", "number of adapters"),
        ("device", "adapters on the device of a replica"),
        ("host", "adapters in host memory of a replica"),
        ("zipf", "exponent of the popularity"),
        ("load", "share of the capacity of all replicas"),
        ("requests", "requests of the trace; the first third warms up"),
        ("report-s", "seconds between two reports of a replica"),
        ("seed", "seed of the trace"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{text} ({value})")
    parser.add_argument("--costs", choices=COSTS, default="8b", help="times of a replica (8b)")
    parser.add_argument("--traces", type=names(TRACES), default=["zipf"], help=", ".join(TRACES))
    parser.add_argument(
        "--policies", type=names(tuple(POLICIES)), default=list(POLICIES), help=", ".join(POLICIES)
    )
    return parser


def _setting(arguments: argparse.Namespace, trace: str) -> Setting:
    given = vars(arguments)
    fields = ("replicas", "adapters", "device", "host", "zipf", "load", "requests")
    return Setting(**{name: given[name] for name in (*fields, "report_s", "seed")}, trace=trace)


def _row(result: Result) -> dict[str, object]:
    return {
        "policy": result.policy,
        "device": round(result.share("device"), 4),
        "disk": round(result.share("disk"), 4),
        "p50 ms": round(result.percentile(0.5) * 1e3, 2),
        "p99 ms": round(result.percentile(0.99) * 1e3, 2),
        "busiest / mean": round(result.imbalance, 2),
        "retried": result.num_retried,
    }


def _section(trace: str, setting: Setting, rows: Table, seconds: float) -> Section:
    x = [str(row["policy"]) for row in rows]
    panels = (
        Panel(
            title=f"{trace}: first token, p99",
            x_label="policy",
            y_label="ms",
            x=x,
            series={"p99": column(rows, "p99 ms"), "p50": column(rows, "p50 ms")},
        ),
        Panel(
            title=f"{trace}: adapters found on the device",
            x_label="policy",
            y_label="share of requests",
            x=x,
            series={"device": column(rows, "device"), "disk": column(rows, "disk")},
        ),
    )
    note = f"{setting.requests} requests, load {setting.load:g}; {seconds:.1f} s to simulate."
    title = f"{trace}: {setting.replicas} replicas, {setting.adapters} adapters"
    return Section(
        title=title,
        rows=rows,
        notes=(note,),
        panels=panels,
        name=trace,
    )


if __name__ == "__main__":
    main()
