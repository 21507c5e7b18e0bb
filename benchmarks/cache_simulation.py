"""Eviction policies over the adapter tiers, simulated on published and drifting traces.

    python -m benchmarks.cache_simulation [--seeds 8] [--requests 6000] [--only NAME] [--out FILE]

Every policy sees the same requests. Seeds begin at 301; loramux's constants were chosen on seeds
1 to 8. No figure is a measurement of this machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import loramux
from benchmarks import workloads
from benchmarks.cache_policies import OURS, POLICIES
from benchmarks.cache_report import Cell, report
from benchmarks.cache_tiers import STEP_S, Outcome, Simulation, adapter_bytes
from benchmarks.workloads import Arrival, Trace, rank_of

FIRST_SEED = 301
SHARES = (0.05, 0.10, 0.25)
# Of all adapters' bytes, as multiples of the device's share.
HOST_FACTOR, DISK_FACTOR = 4, 12
WARM_UP = 0.4
NUM_ADAPTERS = 1000
# Punica's adapters follow from the number of requests; all of them distinct need fewer.
NUM_DISTINCT = 1500


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[..., Trace]
    """Of a seed."""
    ranks: Sequence[int]
    num_adapters: int | None = None
    """None: those that come."""
    shares: Sequence[float] = SHARES
    num_requests: int | None = None


def all_workloads(num_requests: int) -> list[Workload]:
    slora = [
        Workload(
            f"S-LoRA α={alpha} cv={cv}",
            partial(
                workloads.slora, num_adapters=NUM_ADAPTERS, alpha=alpha, cv=cv, requests_per_s=10
            ),
            workloads.SLORA_RANKS,
            NUM_ADAPTERS,
        )
        for alpha in (1, 0.3, 0.1)
        for cv in (1, 4)
    ]
    drifts = [
        Workload(
            f"drift, a swap every {swap_every_s:g} s",
            partial(
                workloads.drifting,
                num_adapters=NUM_ADAPTERS,
                requests_per_s=10,
                swap_every_s=swap_every_s,
            ),
            workloads.SLORA_RANKS,
            NUM_ADAPTERS,
        )
        for swap_every_s in (6.0, 1.2)
    ]
    chameleon = Workload(
        "Chameleon",
        partial(workloads.chameleon, num_adapters=100, requests_per_s=0.5),
        workloads.CHAMELEON_RANKS,
        100,
    )
    return [*slora, *punica_workloads(num_requests), chameleon, *drifts]


def punica_workloads(num_requests: int) -> Iterator[Workload]:
    sizes: dict[workloads.Popularity, Sequence[float]] = {
        "identical": SHARES[-1:],
        "uniform": SHARES,
        "skewed": SHARES[1:],
        "distinct": SHARES[:1],
    }
    for popularity, shares in sizes.items():
        trace = partial(
            workloads.punica, popularity, num_requests=num_requests, requests_per_s=0.02
        )
        limit = min(NUM_DISTINCT, num_requests) if popularity == "distinct" else None
        name = f"Punica {popularity}"
        yield Workload(name, trace, workloads.PUNICA_RANKS, shares=shares, num_requests=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="how many")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--step-ms", type=float, default=1e3 * STEP_S, help="0: no steps")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the report here")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    chosen = [w for w in all_workloads(args.requests) if args.only in w.name]
    if not chosen:
        parser.error(f"no workload has {args.only!r} in its name")
    cells = run_all(
        chosen,
        num_requests=args.requests,
        seeds=seeds,
        step_s=args.step_ms / 1e3,
        num_processes=args.processes,
    )
    command = ["python", "-m", "benchmarks.cache_simulation", *sys.argv[1:]]
    settings = {
        "Command": f"`{shlex.join(command)}`",
        "Python": platform.python_version(),
        "loramux": loramux.__version__,
        "Step": f"{args.step_ms:g} ms",
        "Requests": f"{args.requests} with each of the seeds {seeds[0]} to {seeds[-1]}",
        "CPU seconds": f"{sum(os.times()[:4]):.0f}",
    }
    text = report(cells, ours=OURS, settings=settings)
    print(text)
    if args.out is not None:
        args.out.write_text(text)


def run_all(
    chosen: Sequence[Workload],
    *,
    num_requests: int,
    seeds: Sequence[int],
    step_s: float,
    num_processes: int = 1,
) -> list[Cell]:
    run_one = partial(run_workload, num_requests=num_requests, seeds=seeds, step_s=step_s)
    if num_processes == 1:
        return [cell for workload in chosen for cell in run_one(workload)]
    with ProcessPoolExecutor(num_processes) as pool:
        return [cell for cells in pool.map(run_one, chosen) for cell in cells]


def run_workload(
    workload: Workload, *, num_requests: int, seeds: Sequence[int], step_s: float
) -> list[Cell]:
    cells = []
    runs = [arrivals_of(workload, num_requests, seed) for seed in seeds]
    for share in workload.shares:
        for policy in POLICIES:
            outcomes = [
                simulate(policy, arrivals, sizes, share=share, step_s=step_s)
                for arrivals, sizes in runs
            ]
            cells.append(Cell.of(f"{workload.name}, {share:.0%}", policy, outcomes))
    print(f"done: {workload.name}", file=sys.stderr, flush=True)
    return cells


def arrivals_of(
    workload: Workload, num_requests: int, seed: int
) -> tuple[list[Arrival], dict[int, int]]:
    """The requests, and the bytes of every adapter in a random order."""
    arrivals = workloads.first(workload.make(seed=seed), workload.num_requests or num_requests)
    indices = list(range(workload.num_adapters or 1 + max(a.adapter for a in arrivals)))
    random.Random(seed).shuffle(indices)
    return arrivals, {index: adapter_bytes(rank_of(index, workload.ranks)) for index in indices}


def simulate(
    policy: str,
    arrivals: Sequence[Arrival],
    sizes: dict[int, int],
    *,
    share: float,
    step_s: float = STEP_S,
) -> Outcome:
    total, largest = sum(sizes.values()), max(sizes.values())
    # Two of the largest fit, so that one can come while another is in use.
    device, host, disk = (
        max(int(min(1.0, factor * share) * total), 2 * largest)
        for factor in (1, HOST_FACTOR, DISK_FACTOR)
    )
    simulation = Simulation(
        sizes,
        capacities=(device, host, disk),
        make=POLICIES[policy],
        step_s=step_s,
        warm_up_s=WARM_UP * arrivals[-1].time_s,
    )
    return simulation.run(arrivals)


if __name__ == "__main__":
    main()
