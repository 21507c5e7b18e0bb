"""The scenarios of benchmarks/trace.py: workloads on an engine and base-only runs beside them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from benchmarks.lib.random_weights import RandomAdapters
from benchmarks.lib.report import Panel, Section, Table, column
from benchmarks.lib.traffic import (
    Run,
    Watch,
    make_request,
    make_requests,
    milliseconds,
    percentile,
    replay,
    saturate,
)
from benchmarks.lib.workloads import (
    SLORA_RANKS,
    Arrival,
    Popularity,
    first,
    num_skewed_adapters,
    punica,
    rank_of,
    slora,
    until,
)
from loramux.engine.engine import Engine
from loramux.memory.tiers import TierCounters
from loramux.types.request import Request

POPULARITIES: tuple[Popularity, ...] = ("identical", "uniform", "skewed", "distinct")
SLO_S = 6.0
RANK = 16
FEW = ([RANK] * 8, "all")
"""Ranks and sites of the adapters in `few`."""


@dataclass(slots=True)
class TraceBench:
    """Runs traces on one engine with random adapters."""

    engine: Engine
    adapters: RandomAdapters
    options: argparse.Namespace
    seeds: count[int] = field(default_factory=count)
    """Seeds of the prompts: no run finds the prompts of another in the prefix cache."""

    def saturated(
        self, arrivals: Sequence[Arrival], cids: Sequence[str], watch: Watch | None = None
    ) -> Run:
        requests = self._requests(arrivals, cids)
        return saturate(self.engine, requests, backlog=self.options.backlog, watch=watch)

    def real_time(self, arrivals: Sequence[Arrival], cids: Sequence[str]) -> Run:
        return replay(self.engine, arrivals, self._requests(arrivals, cids))

    def _requests(self, arrivals: Sequence[Arrival], cids: Sequence[str]) -> list[Request]:
        vocab_size = self.engine.vocab_size
        return make_requests(arrivals, cids, vocab_size=vocab_size, seed=next(self.seeds))

    def warm(self, cids: Sequence[str]) -> int:
        """Load adapters until all are on the device or one was evicted; return their number.

        Each generates one token, so that the eviction policy counts it as used, not as prefetched.
        """
        residency, counters = self.engine.residency, self.counters
        evicted, watch = counters.evictions, Watch()
        for number, cid in enumerate(cids):
            if counters.evictions > evicted or not residency.load_now([cid]):
                break
            residency.release([cid])
            request = make_request(f"warm-{number}", (1,), ((cid, 1.0),), 1)
            self.engine.add(request)
            watch.add(request, time.perf_counter())
        while self.engine.has_work:
            watch.step(self.engine, time.perf_counter)
        return len(residency)

    @property
    def counters(self) -> TierCounters:
        return self.engine.memory.costs.device

    def lora(
        self, arrivals: Sequence[Arrival], cids: Sequence[str], *, is_real_time: bool = False
    ) -> tuple[Run, dict[str, object]]:
        """Run a trace on adapters; return the run and the device tier's counters."""
        before = replace(self.counters)
        run = (self.real_time if is_real_time else self.saturated)(arrivals, cids)
        after = self.counters
        hits, misses = after.hits - before.hits, after.misses - before.misses
        facts: dict[str, object] = {
            "device hit rate": hits / max(1, hits + misses),
            "loads": after.loads - before.loads,
            "evictions": after.evictions - before.evictions,
        }
        return run, facts

    def slora_lengths(self, num_adapters: int, alpha: float = 1.0) -> list[Arrival]:
        """Draw a trace; one seed gives all traces the same lengths."""
        options = self.options
        trace = slora(
            num_adapters=num_adapters, alpha=alpha, requests_per_s=1.0, tokens=tuple(options.tokens)
        )
        return first(trace, options.requests)


def row_of(name: str, run: Run, *, is_real_time: bool = False) -> dict[str, object]:
    row: dict[str, object] = {
        "run": name,
        "requests": run.num_done,
        "seconds": run.seconds,
        "requests/s": run.requests_per_s,
        "output tok/s": run.output_per_s,
        "prompt tok/s": run.num_prompt / run.seconds,
        "distinct adapters": run.mean_adapters,
        "inter-token P50 ms": milliseconds(percentile(run.gaps_s, 50)),
        "inter-token P99 ms": milliseconds(percentile(run.gaps_s, 99)),
    }
    if is_real_time:
        row["first token P50 ms"] = milliseconds(percentile(run.ttfts_s, 50))
        row["first token P99 ms"] = milliseconds(percentile(run.ttfts_s, 99))
        row["first token within 6 s"] = sum(s <= SLO_S for s in run.ttfts_s) / len(run.ttfts_s)
    else:
        row["window"] = "full batch" if run.is_steady else "whole run"
    return row


def few(bench: TraceBench) -> Section:
    """Compare eight adapters on every linear layer with base-only."""
    arrivals = bench.slora_lengths(8)
    cids = bench.adapters.add(*FEW)
    return compare(bench, "8 adapters, all linear layers, rank 16", arrivals, cids)


def many(bench: TraceBench) -> Section:
    """Compare S-LoRA's uniform trace over ranks 8 to 64 with base-only."""
    num_adapters = bench.options.many
    arrivals = bench.slora_lengths(num_adapters, bench.options.alpha)
    cids = bench.adapters.add(*slora_adapters(num_adapters))
    title = f"S-LoRA trace: {num_adapters} adapters, q,k,v,o, ranks 8 to 64"
    return compare(bench, title, arrivals, cids)


def slora_adapters(count: int) -> tuple[list[int], str]:
    """Return the ranks and sites of S-LoRA's adapters."""
    return [rank_of(number, SLORA_RANKS) for number in range(count)], "qkvo"


def compare(
    bench: TraceBench, title: str, arrivals: Sequence[Arrival], cids: Sequence[str]
) -> Section:
    """Alternate base-only and LoRA runs with a full batch."""
    rows: Table = []
    note = bench.adapters.note(cids)
    num_warm = bench.warm(cids)
    for number in range(bench.options.repeats):
        base = bench.saturated(arrivals, [])
        run, facts = bench.lora(arrivals, cids)
        rows.append({**row_of(f"base {number + 1}", base), **ratios(base, base)})
        rows.append({**row_of(f"LoRA {number + 1}", run), **facts, **ratios(run, base)})
    bench.adapters.forget(cids)
    warm = f"{num_warm} of them were on the device at the start."
    return section(title, rows, (f"{note} {warm}",))


def ratios(run: Run, base: Run) -> dict[str, object]:
    """Compare by output tokens and by requests, which differ if the shares of prefill differ."""
    return {
        "/ base-only": run.output_per_s / base.output_per_s,
        "requests / base-only": run.requests_per_s / base.requests_per_s,
    }


def registered(bench: TraceBench) -> Section:
    """Run the same trace over more and more adapters, and the first size again at the end."""
    rows: Table = []
    notes = []
    sizes = bench.options.registered
    first_speed = 0.0
    for number, size in enumerate([*sizes, sizes[0]]):
        cids = bench.adapters.add([RANK] * size, "qkvo")
        num_warm = bench.warm(cids)
        run, facts = bench.lora(bench.slora_lengths(size, bench.options.alpha), cids)
        first_speed = first_speed or run.output_per_s
        row = row_of(f"{size} adapters" + (", again" if number == len(sizes) else ""), run)
        ratio = run.output_per_s / first_speed
        rows.append({**row, **facts, "on device": num_warm, f"/ {sizes[0]} adapters": ratio})
        notes.append(bench.adapters.note(cids))
        bench.adapters.forget(cids)
    return section("Registered adapters: q,k,v,o, rank 16, uniform", rows, tuple(notes[:-1]))


def base_only(bench: TraceBench) -> Section:
    """Alternate base requests without adapters and with many adapters on the device."""
    arrivals = bench.slora_lengths(1)
    rows: Table = []
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(bench.options.base_repeats):
        for name, count_on in (("off", 0), ("on", bench.options.many)):
            cids = bench.adapters.add([RANK] * count_on, "qkvo")
            num_warm = bench.warm(cids)
            run = bench.saturated(arrivals, [])
            bench.adapters.forget(cids)
            speeds[name].append(run.output_per_s)
            row = row_of(f"LoRA {name} {number + 1}", run)
            rows.append({**row, "registered": count_on, "on device": num_warm})
    ratio = sum(speeds["on"]) / sum(speeds["off"])
    rows.append({"run": "on / off", "output tok/s": ratio})
    note = (
        "off: no adapter is registered; the kernels and graphs of LoRA exist and do not run. on: "
        "adapters are registered and on the device, and every request asks for the base."
    )
    return section("Base requests, LoRA on and off", rows, (note,))


def slora_trace(bench: TraceBench) -> Section:
    """Replay S-LoRA's arrivals in real time."""
    options = bench.options
    num_adapters = options.many
    trace = slora(
        num_adapters=num_adapters,
        alpha=options.alpha,
        requests_per_s=options.rate,
        cv=options.cv,
        tokens=tuple(options.tokens),
    )
    arrivals = until(trace, options.seconds)
    cids = bench.adapters.add(*slora_adapters(num_adapters))
    base = bench.real_time(arrivals, [])
    run, facts = bench.lora(arrivals, cids, is_real_time=True)
    note = bench.adapters.note(cids)
    bench.adapters.forget(cids)
    rows: Table = [
        {**row_of("base", base, is_real_time=True), "/ base-only": 1.0},
        {
            **row_of("LoRA", run, is_real_time=True),
            **facts,
            "/ base-only": run.output_per_s / base.output_per_s,
        },
    ]
    title = f"S-LoRA trace in real time: {num_adapters} adapters, {options.rate:g} requests/s"
    return section(title, rows, (note + " All were in host memory at the start.",))


def punica_traces(bench: TraceBench) -> Section:
    """Run Punica's four popularities and lengths with a full batch."""
    options = bench.options
    rows: Table = []
    base_speed = 0.0
    for popularity in POPULARITIES:
        trace = punica(
            popularity,
            num_requests=options.requests,
            requests_per_s=1.0,
            max_tokens=options.punica_tokens,
        )
        arrivals = first(trace, options.requests)
        if not rows:
            base = bench.saturated(arrivals, [])
            base_speed = base.output_per_s
            rows.append({**row_of("base", base), "adapters": 0, "/ base-only": 1.0})
        num_adapters = max(arrival.adapter for arrival in arrivals) + 1
        cids = bench.adapters.add([RANK] * num_adapters, "all")
        run, facts = bench.lora(arrivals, cids)
        bench.adapters.forget(cids)
        ratio = run.output_per_s / base_speed
        rows.append({**row_of(popularity, run), "adapters": num_adapters, **facts})
        rows[-1]["/ base-only"] = ratio
    note = f"skewed: {num_skewed_adapters(options.requests)} adapters, each 1.5 times the next."
    return section("Punica: all linear layers, rank 16", rows, (note,))


def section(title: str, rows: Table, notes: tuple[str, ...]) -> Section:
    shown = [row for row in rows if "requests/s" in row]
    x = [str(row["run"]) for row in shown]
    speed = Panel(
        title=title,
        x_label="run",
        y_label="output tokens/s",
        x=x,
        series={"output tok/s": column(shown, "output tok/s")},
    )
    gaps = Panel(
        title=f"{title}: inter-token latency",
        x_label="run",
        y_label="ms",
        x=x,
        series={name: column(shown, f"inter-token {name} ms") for name in ("P50", "P99")},
    )
    return Section(title=title, rows=rows, notes=notes, panels=(speed, gaps))
