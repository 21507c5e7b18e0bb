"""The scenario `loads`: adapters load from host memory while streams decode."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

from benchmarks.lib.report import Panel, Section, Table, column
from benchmarks.lib.scenarios import RANK, TraceBench
from benchmarks.lib.traffic import Watch, finish, make_request, milliseconds, percentile
from loramux.engine.engine import Engine
from loramux.types.residency import Tier

_NUM_HOT = 8


class ColdLoads:
    """Requests cold adapters at a given rate, and records when each becomes schedulable."""

    def __init__(self, engine: Engine, cids: Sequence[str]) -> None:
        self._engine = engine
        self._cids = list(reversed(cids))
        self._requested: dict[str, float] = {}
        self._arrived: dict[str, float] = {}
        self._per_s = 0.0
        self._next_s = 0.0
        self.seconds: list[float] = []
        self.copy_seconds: list[float] = []
        """The part of `seconds` in which the loader copies."""
        self._placement = engine.memory.placement
        self._version = self._placement.moves.version
        self._poll = engine.residency.poll
        engine.residency.poll = self._timed_poll  # type: ignore[method-assign]

    def start(self, per_s: float, now: float) -> None:
        self._per_s, self._next_s = per_s, now

    def advance(self, now: float) -> None:
        """Record arrivals between two steps, and request the next adapter when it is due."""
        residency = self._engine.residency
        for cid, arrived in self._arrived.items():
            self.seconds.append(arrived - self._requested.pop(cid))
            self.copy_seconds.append(residency.records[cid].load_s)
            residency.remove_waiters([cid])
        self._arrived.clear()
        if self._per_s and now >= self._next_s:
            self._next_s += 1 / self._per_s
            self.request_one()

    def request_one(self) -> None:
        cid = self._cids.pop()
        self._requested[cid] = time.perf_counter()
        self._engine.residency.add_waiters([cid])

    def drain(self) -> None:
        """Stop requesting, and wait for the loads in flight."""
        self._per_s = 0.0
        while self._requested:
            self.advance(time.perf_counter())
            self._engine.step()

    def close(self) -> None:
        self._engine.residency.poll = self._poll  # type: ignore[method-assign]

    def _timed_poll(self, *, timeout_s: float = 0.0) -> int:
        num_moves = self._poll(timeout_s=timeout_s)
        delta = self._placement.changes_since(self._version)
        self._version = delta.version
        for cid, tier in delta.tiers:
            if tier is Tier.DEVICE and cid in self._requested:
                self._arrived.setdefault(cid, time.perf_counter())
        return num_moves


def cold_loads(bench: TraceBench) -> Section:
    """Measure adapters of rank 16 on q,k,v,o and on every linear layer."""
    rows: Table = []
    options = bench.options
    hot = bench.adapters.add([RANK] * _NUM_HOT, "all")
    bench.warm(hot)
    for sites in ("qkvo", "all"):
        count = options.loads + int(sum(options.load_rates) * options.round_s * options.rounds) + 8
        cids = bench.adapters.add([RANK] * count, sites)
        megabytes = bench.adapters.num_bytes(RANK, sites) / 1e6
        loads = ColdLoads(bench.engine, cids)
        for _ in range(options.loads):
            loads.request_one()
            loads.drain()
        rows.append({"adapter": sites, "MB": megabytes, "engine": "idle", **load_row(loads)})
        rows += streams_with_loads(bench, hot, loads, {"adapter": sites, "MB": megabytes})
        loads.close()
        bench.adapters.forget(cids)
    bench.adapters.forget(hot)
    notes = (
        "schedulable: from the request for an adapter in host memory until the step loop can plan "
        "with it, which with running streams is the start of the next step at the earliest. copy: "
        "the loader's own time.",
        f"{options.streams} streams on {_NUM_HOT} adapters of rank 16 on all linear layers; rounds "
        f"of {options.round_s:g} s with and without loads alternate, {options.rounds} of each.",
    )
    return Section(
        title="Cold adapters in host memory", rows=rows, notes=notes, panels=panels_of(rows)
    )


def load_row(loads: ColdLoads) -> dict[str, object]:
    row: dict[str, object] = {
        "loads": len(loads.seconds),
        "schedulable P50 ms": milliseconds(percentile(loads.seconds, 50)),
        "schedulable P99 ms": milliseconds(percentile(loads.seconds, 99)),
        "copy P50 ms": milliseconds(percentile(loads.copy_seconds, 50)),
        "copy P99 ms": milliseconds(percentile(loads.copy_seconds, 99)),
    }
    loads.seconds.clear()
    loads.copy_seconds.clear()
    return row


def streams_with_loads(
    bench: TraceBench, hot: list[str], loads: ColdLoads, facts: dict[str, object]
) -> Table:
    options = bench.options
    rates = [0.0, *options.load_rates]
    gaps: dict[float, list[float]] = {rate: [] for rate in rates}
    taken: dict[float, tuple[list[float], list[float]]] = {rate: ([], []) for rate in rates}
    for _ in range(options.rounds):
        for rate in rates:
            gaps[rate] += run_round(bench, hot, loads, rate)
            for kept, new in zip(taken[rate], (loads.seconds, loads.copy_seconds), strict=True):
                kept += new
                new.clear()
    quiet_p99 = percentile(gaps[0.0], 99) or 0.0
    rows: Table = []
    for rate in rates:
        loads.seconds[:], loads.copy_seconds[:] = taken[rate]
        p99 = percentile(gaps[rate], 99) or 0.0
        row = {**facts, "engine": f"{options.streams} streams, {rate:g} loads/s", **load_row(loads)}
        row["inter-token P50 ms"] = milliseconds(percentile(gaps[rate], 50))
        row["inter-token P99 ms"] = milliseconds(p99)
        row["inter-token max ms"] = milliseconds(max(gaps[rate]))
        row["P99 / without loads"] = p99 / quiet_p99
        rows.append(row)
    return rows


def run_round(bench: TraceBench, hot: list[str], loads: ColdLoads, rate: float) -> list[float]:
    """Return the inter-token latencies of all streams in seconds."""
    engine, options = bench.engine, bench.options
    watch = Watch()
    source = random.Random(0)
    room = engine.scheduler.config.max_model_len - options.stream_prompt
    seed = next(bench.seeds)
    for number in range(options.streams):
        prompt = source.choices(range(engine.vocab_size), k=options.stream_prompt)
        selection = ((hot[number % len(hot)], 1.0),)
        request = make_request(f"stream-{seed}-{number}", prompt, selection, room)
        engine.add(request)
        watch.add(request, time.perf_counter())
    tokens: Counter[str] = Counter()
    # Timing starts after all prefills and a few tokens.
    while len(tokens) < options.streams or min(tokens.values()) < 4:
        events = engine.step()
        tokens.update(event.request_id for event in events)
        watch.take(events, time.perf_counter())
    watch.reset()
    began = now = time.perf_counter()
    loads.start(rate, began)
    while now - began < options.round_s and len(watch.open) == options.streams:
        loads.advance(now)
        events = engine.step()
        now = time.perf_counter()
        watch.take(events, now)
    loads.drain()
    finish(engine, watch)
    return watch.run.gaps_s


def panels_of(rows: Table) -> tuple[Panel, ...]:
    def label(row: dict[str, object]) -> str:
        return f"{row['adapter']}: {row['engine']}"

    loads = [row for row in rows if row["loads"]]
    streams = [row for row in rows if "inter-token P99 ms" in row]
    waits = Panel(
        title="From request to schedulable",
        x_label="adapter, engine",
        y_label="ms",
        x=[label(row) for row in loads],
        series={name: column(loads, f"schedulable {name} ms") for name in ("P50", "P99")},
    )
    gaps = Panel(
        title="Inter-token latency of running streams",
        x_label="adapter, engine",
        y_label="ms",
        x=[label(row) for row in streams],
        series={name: column(streams, f"inter-token {name} ms") for name in ("P50", "P99")},
    )
    return waits, gaps
