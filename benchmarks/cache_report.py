"""The simulation's outcomes as tables: one that says whether ours is best, and all figures."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cache_tiers import DEVICE, LINKS, Outcome
from benchmarks.report import markdown

# What "within 1 %" means: points of hit rate, and a share of the waiting time.
TOLERANCE_POINTS = 1.0
TOLERANCE_SHARE = 0.01
# Student's t for a two-sided 95 % interval, by degrees of freedom from 1.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

_LOADS = ", ".join(
    f"{name} {1e3 * start_s:g} ms and {rate / 1e9:g} GB/s"
    for name, (start_s, rate) in LINKS.items()
)
MODEL = f"""\
Sizes are those of q,k,v,o adapters of Llama-3.1-8B: 27.3 MB at rank 16. The percentage in a row is
the device tier's share of all adapters' bytes; host memory has 4 times as much, the disk 12 times,
at most all. A load takes t0 + size / bandwidth of the place where the adapter is found, and queues
for that link: {_LOADS}.
Requests and finished loads are noticed once a step, so that a miss costs a step at least. Adapters
of running and waiting requests stay. Each tier has a policy of its own, which sees what the tiers
above it have missed. A wait is the time for which a request is held up for its adapter. The first
40 % of a trace is not counted. Figures are means over the seeds; the constants of our policy were
chosen on other seeds. "±" is half the 95 % interval of the change, from the differences seed by
seed: a change that is smaller cannot be told from none. GDSF comes with a cost of 1 ("hits") and
of the seconds of a miss."""


@dataclass(frozen=True)
class Cell:
    """One policy on one workload and size; means over the seeds."""

    row: str
    policy: str
    hit_rates: Mapping[str, float]
    """Of the requests that reached a tier, in percent."""
    waits_ms: Sequence[float]
    """The mean wait with each seed."""
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
    """Ours beside the best of the others, for each of the two figures."""

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
        """Half the 95 % interval of the change, by the differences seed by seed."""
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


def report(cells: Sequence[Cell], *, ours: str, settings: Mapping[str, str]) -> str:
    comparisons = compare(cells, ours)
    parts = [
        f"# eviction-simulation, {datetime.date.today().isoformat()}",
        "\n".join(f"- {name}: {value}" for name, value in settings.items()),
        MODEL,
        "## Ours beside the best of the others",
        verdict(comparisons),
        table(map(comparison_row, comparisons)),
        "## Hit rate of the device tier, %",
        by_policy(cells, lambda cell: f"{cell.device_hits:.1f}"),
        "## Mean wait, ms",
        by_policy(cells, lambda cell: f"{cell.mean_wait_ms:.2f}"),
        "## P99 of the wait, ms",
        by_policy(cells, lambda cell: f"{cell.p99_wait_ms:.0f}"),
        "## GB moved from host, disk and remote",
        by_policy(cells, lambda cell: " / ".join(f"{gb:.0f}" for gb in cell.moved_gb.values())),
        "## Means over all rows",
        table(mean_row(cells, policy) for policy in dict.fromkeys(c.policy for c in cells)),
    ]
    return "\n\n".join(parts) + "\n"


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


def by_policy(cells: Sequence[Cell], show: Callable[[Cell], str]) -> str:
    rows: dict[str, dict[str, object]] = {}
    for cell in cells:
        row = rows.setdefault(cell.row, {"workload, device share": cell.row})
        row[cell.policy] = show(cell)
    return table(rows.values())


def table(rows: Iterable[dict[str, object]]) -> str:
    return "\n".join(markdown(list(rows)))


def mark(text: str, holds: bool) -> str:
    return text if holds else f"**{text}**"
