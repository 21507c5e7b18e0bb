"""Compare eviction policies over the adapter tiers, simulated on published and drifting traces.

    python -m benchmarks.studies.cache_simulation [--seeds 8] [--requests 6000] [--only NAME]

Every policy sees the same requests. Seeds start at 301; loramux's constants were chosen on seeds 1
to 8. The result does not depend on this machine.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import loramux
from benchmarks.lib import workloads
from benchmarks.lib.report import Section, parse_arguments, start_report
from benchmarks.lib.workloads import Arrival, Trace, rank_of
from benchmarks.studies.cache_model import (
    DEVICE,
    LINKS,
    OURS,
    POLICIES,
    STEP_S,
    Outcome,
    Simulation,
    adapter_bytes,
)

FIRST_SEED = 301
SHARES = (0.05, 0.10, 0.25)
HOST_FACTOR, DISK_FACTOR = 4, 12
"""Capacities of the lower tiers as multiples of the device tier's."""
WARM_UP = 0.4
NUM_ADAPTERS = 1000
NUM_DISTINCT = 1500
"""Requests of Punica's trace of distinct adapters."""

TOLERANCE_POINTS = 1.0
"""Points of hit rate within which a policy counts as the best."""
TOLERANCE_SHARE = 0.01
"""Share of the mean wait within which a policy counts as the best."""
# Student's t for a two-sided 95 % interval, by degrees of freedom from 1.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

_LOADS = ", ".join(
    f"{name} {1e3 * start_s:g} ms and {rate / 1e9:g} GB/s"
    for name, (start_s, rate) in LINKS.items()
)
MODEL = f"""\
Sizes are those of q,k,v,o adapters of Llama-3.1-8B: 27.3 MB at rank 16. The percentage in a row is
the device tier's share of all adapters' bytes; host memory has 4 times as much, the disk 12 times,
at most all. A load takes t0 + size / bandwidth of the tier with the adapter, and queues for that
link: {_LOADS}.
Requests and finished loads are seen once per step, so that a miss costs at least one step. Adapters
of running and waiting requests are not evicted. Each tier has its own policy, which sees the misses
of the tiers above. A wait is the time that a request waits for its adapter. The first 40 % of a
trace is warm-up. Figures are means over the seeds; the constants of our policy were chosen on other
seeds. "±" is half the 95 % interval of the change, from the differences per seed; a smaller change
is not significant. GDSF runs with a cost of 1 ("hits") and with the seconds of a miss."""


@dataclass(frozen=True)
class Workload:
    """A trace and the capacities to simulate it with."""

    name: str
    make: Callable[..., Trace]
    """Make the trace from `seed`."""
    ranks: Sequence[int]
    num_adapters: int | None = None
    """None: the adapters of the trace."""
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
    """Return the requests, and the bytes of every adapter in a random order."""
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
    # Two of the largest fit, so that one can load while the other is in use.
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


@dataclass(frozen=True)
class Cell:
    """One policy on one workload and capacity, as means over the seeds."""

    row: str
    policy: str
    hit_rates: Mapping[str, float]
    """By tier, the percentage of hits among the requests that reached it."""
    waits_ms: Sequence[float]
    """The mean wait of each seed."""
    p99_wait_ms: float
    moved_gb: Mapping[str, float]

    @classmethod
    def of(cls, row: str, policy: str, outcomes: Sequence[Outcome]) -> Cell:
        return cls(
            row=row,
            policy=policy,
            hit_rates={
                tier: statistics.fmean(hit_rate(outcome, tier) for outcome in outcomes)
                for tier in (DEVICE, *LINKS)
            },
            waits_ms=[1e3 * statistics.fmean(outcome.waits_s) for outcome in outcomes],
            p99_wait_ms=1e3 * statistics.fmean(p99(o.waits_s) for o in outcomes),
            moved_gb={
                link: statistics.fmean(o.moved_bytes[link] for o in outcomes) / 1e9
                for link in LINKS
            },
        )

    @property
    def mean_wait_ms(self) -> float:
        return statistics.fmean(self.waits_ms)

    @property
    def device_hits(self) -> float:
        return self.hit_rates[DEVICE]


def hit_rate(outcome: Outcome, tier: str) -> float:
    tiers = list(outcome.found)
    reached = sum(outcome.found[name] for name in tiers[tiers.index(tier) :])
    return 100.0 * outcome.found[tier] / reached if reached else 100.0


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


@dataclass(frozen=True)
class Comparison:
    """Our policy and the best other policy in hit rate and in mean wait."""

    row: str
    ours: Cell
    most_hits: Cell
    least_wait: Cell

    @property
    def points(self) -> float:
        return self.ours.device_hits - self.most_hits.device_hits

    @property
    def wait_change(self) -> float:
        if self.least_wait.mean_wait_ms == 0:
            return 0.0 if self.ours.mean_wait_ms == 0 else float("inf")
        return self.ours.mean_wait_ms / self.least_wait.mean_wait_ms - 1

    @property
    def wait_margin(self) -> float:
        """Return half the 95 % interval of the change, from the differences per seed."""
        pairs = zip(self.ours.waits_ms, self.least_wait.waits_ms, strict=True)
        differences = [own - other for own, other in pairs]
        if len(differences) < 2 or self.least_wait.mean_wait_ms == 0:
            return 0.0
        t = T_95[min(len(differences) - 1, len(T_95)) - 1]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return t * error / self.least_wait.mean_wait_ms

    @property
    def hits_hold(self) -> bool:
        return self.points >= -TOLERANCE_POINTS

    @property
    def wait_holds(self) -> bool:
        return self.wait_change <= TOLERANCE_SHARE


def compare(cells: Sequence[Cell], ours: str) -> list[Comparison]:
    comparisons = []
    for row in dict.fromkeys(cell.row for cell in cells):
        own = next(cell for cell in cells if (cell.row, cell.policy) == (row, ours))
        others = [cell for cell in cells if cell.row == row and cell.policy != ours]
        most_hits = max(others, key=lambda cell: cell.device_hits)
        least_wait = min(others, key=lambda cell: cell.mean_wait_ms)
        comparisons.append(Comparison(row, own, most_hits, least_wait))
    return comparisons


def report(cells: Sequence[Cell], *, ours: str) -> list[Section]:
    comparisons = compare(cells, ours)
    return [
        Section(
            title="Our policy and the best of the others",
            rows=[comparison_row(comparison) for comparison in comparisons],
            notes=(verdict(comparisons), MODEL),
        ),
        by_policy("Hit rate of the device tier, %", cells, lambda cell: cell.device_hits),
        by_policy("Mean wait, ms", cells, lambda cell: cell.mean_wait_ms),
        by_policy("P99 of the wait, ms", cells, lambda cell: cell.p99_wait_ms),
        by_policy(
            "GB moved from host, disk and remote",
            cells,
            lambda cell: " / ".join(f"{gb:.0f}" for gb in cell.moved_gb.values()),
        ),
        Section(
            title="Means over all rows",
            rows=[mean_row(cells, policy) for policy in dict.fromkeys(c.policy for c in cells)],
        ),
    ]


def verdict(comparisons: Sequence[Comparison]) -> str:
    lines = []
    for what, within, failed in (
        (
            "Hit rate",
            f"{TOLERANCE_POINTS:g} point",
            [c.row for c in comparisons if not c.hits_hold],
        ),
        (
            "Mean wait",
            f"{TOLERANCE_SHARE:.0%}",
            [c.row for c in comparisons if not c.wait_holds],
        ),
    ):
        held = len(comparisons) - len(failed)
        text = f"{what}: best or within {within} of the best on {held} of {len(comparisons)} rows"
        lines.append(f"{text}; not on: {'; '.join(failed)}." if failed else f"{text}.")
    return "\n".join(lines)


def comparison_row(comparison: Comparison) -> dict[str, object]:
    best_hits, best_wait = comparison.most_hits, comparison.least_wait
    return {
        "workload, device share": comparison.row,
        "best other hit rate, %": f"{best_hits.device_hits:.1f} ({best_hits.policy})",
        "ours, %": f"{comparison.ours.device_hits:.1f}",
        "points": mark(f"{comparison.points:+.1f}", comparison.hits_hold),
        "best other mean wait, ms": f"{best_wait.mean_wait_ms:.2f} ({best_wait.policy})",
        "ours, ms": f"{comparison.ours.mean_wait_ms:.2f}",
        "change": mark(f"{comparison.wait_change:+.1%}", comparison.wait_holds),
        "± (95 %)": f"{comparison.wait_margin:.1%}",
    }


def mean_row(cells: Sequence[Cell], policy: str) -> dict[str, object]:
    own = [cell for cell in cells if cell.policy == policy]
    tiers = (DEVICE, *list(LINKS)[:-1])
    return {
        "policy": policy,
        **{
            f"{tier} hits, %": f"{statistics.fmean(c.hit_rates[tier] for c in own):.1f}"
            for tier in tiers
        },
        "mean wait, ms": f"{statistics.fmean(c.mean_wait_ms for c in own):.2f}",
        "P99, ms": f"{statistics.fmean(c.p99_wait_ms for c in own):.0f}",
        **{
            f"GB from {link}": f"{statistics.fmean(c.moved_gb[link] for c in own):.1f}"
            for link in LINKS
        },
    }


def by_policy(title: str, cells: Sequence[Cell], figure: Callable[[Cell], object]) -> Section:
    rows: dict[str, dict[str, object]] = {}
    for cell in cells:
        row = rows.setdefault(cell.row, {"workload, device share": cell.row})
        row[cell.policy] = figure(cell)
    return Section(title=title, rows=list(rows.values()))


def mark(text: str, holds: bool) -> str:
    return text if holds else f"**{text}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--only", default="", help="run the workloads whose name contains this")
    parser.add_argument(
        "--step-ms", type=float, default=1e3 * STEP_S, help="step time; 0: no steps"
    )
    parser.add_argument("--processes", type=int, default=1)
    args = parse_arguments(parser)
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
    settings = {
        "Python": platform.python_version(),
        "loramux": loramux.__version__,
        "Step": f"{args.step_ms:g} ms",
        "Requests": f"{args.requests} with each of the seeds {seeds[0]} to {seeds[-1]}",
        "CPU seconds": f"{sum(os.times()[:4]):.0f}",
    }
    out = start_report("eviction-simulation", args, settings)
    for section in report(cells, ours=OURS):
        out.add(section)
    out.finish()


if __name__ == "__main__":
    main()
