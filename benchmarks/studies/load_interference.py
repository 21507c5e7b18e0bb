"""Measure inter-token latency with and without cold adapters loading meanwhile.

    python -m benchmarks.studies.load_interference --loads 100 [--repeats 3]

Some streams decode on one adapter. In every other round cold adapters are loaded one after another
from the disk tier (with --from source from their PEFT folders) through host memory into pool pages.
Rounds with and without loads alternate, so that other work on the machine affects both alike. Each
repeat loads all adapters again. Before the first round each is loaded once, because writing to
fresh memory of the pool is slower. The last rows are of all repeats together: the P99 of a few
hundred steps rests on its three slowest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import make_adapter
from benchmarks.lib.report import Table, parse_arguments, write_table
from loramux import LLM, SamplingParams
from loramux.adapters.packed.file import SLICE_BYTES
from loramux.engine.engine import Engine
from loramux.memory.adapter_eviction import owner_of
from loramux.memory.loader import SLEEP_FACTOR
from loramux.types.request import Request

MIB = 2**20
LOADER = (
    f"2 SCHED_IDLE threads of the engine's process; after each {SLICE_BYTES // MIB} MiB a pause of "
    f"{SLEEP_FACTOR:.0f} times the work; the step loop has all cores, each of its workers one"
)


@dataclass
class Measured:
    """Inter-token latencies of both kinds of rounds, and load times, in seconds."""

    quiet: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        self.quiet += other.quiet
        self.loaded += other.loaded
        self.loads += other.loads

    def rows(self, name: str) -> Table:
        quiet = row(f"{name}: no loads", self.quiet, [])
        loaded = row(f"{name}: cold loads", self.loaded, self.loads)
        return [quiet, loaded, ratio_row(quiet, loaded)]


def start_streams(llm: LLM, cid: str, count: int, max_tokens: int) -> None:
    for number in range(count):
        llm.engine.add(
            Request(
                request_id=f"stream-{number}",
                prompt_token_ids=tuple(range(100 + number, 116 + number)),
                params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                selection=((cid, 1.0),),
            )
        )
    # Timing starts after all prefills.
    while llm.engine.scheduler.num_waiting:
        llm.engine.step()
    llm.engine.step()


class ColdLoads:
    """Keeps one load in flight; adapters are evicted to the tier that --from names."""

    def __init__(self, engine: Engine, cids: list[str], *, from_source: bool) -> None:
        self._engine = engine
        self._cids: Iterator[str] = iter(cids)
        self._current: str | None = None
        self._from_source = from_source
        self.seconds: list[float] = []
        self.num_loaded = 0
        self._began = 0.0

    def advance(self) -> bool:
        """Record a finished load and start the next; return False when all are loaded."""
        residency = self._engine.residency
        if self._current is not None:
            if not residency.is_ready([self._current]):
                return True
            self.seconds.append(time.perf_counter() - self._began)
            self._take()
        self._current = next(self._cids, None)
        if self._current is not None:
            if self._current in residency:
                residency.evict(owner_of(self._current))
            self._began = time.perf_counter()
            self._engine.memory.tiers.host.drop(self._current)
            if self._from_source and self._engine.memory.tiers.disk is not None:
                self._engine.memory.tiers.disk.drop(self._current)
            residency.add_waiters([self._current])
        return self._current is not None

    def drain(self) -> None:
        """Wait for the load in flight, untimed, so that none continues in a round without loads."""
        while self._current is not None and not self._engine.residency.is_ready([self._current]):
            self._engine.residency.poll(timeout_s=0.05)
        if self._current is not None:
            self._take()
            self._current = None

    def _take(self) -> None:
        assert self._current is not None
        self.num_loaded += 1
        self._engine.residency.remove_waiters([self._current])


def run_round(llm: LLM, cid: str, args: argparse.Namespace, loads: ColdLoads | None) -> list[float]:
    """Return the inter-token latencies of new streams; every round computes the same tokens."""
    engine = llm.engine
    start_streams(llm, cid, args.streams, args.steps + 8)
    gaps = []
    for _ in range(args.steps):
        began = time.perf_counter()
        if loads is not None and not loads.advance():
            break
        engine.step()
        gaps.append(time.perf_counter() - began)
    if loads is not None:
        loads.drain()
    for number in range(args.streams):
        engine.abort(f"stream-{number}")
    return gaps


def row(name: str, gaps: list[float], loads: list[float]) -> dict[str, object]:
    cuts = statistics.quantiles(gaps, n=100)
    load_cuts = statistics.quantiles(loads, n=100) if len(loads) > 1 else None
    return {
        "rounds": name,
        "steps": len(gaps),
        "P50 ms": f"{1000 * cuts[49]:.1f}",
        "P90 ms": f"{1000 * cuts[89]:.1f}",
        "P99 ms": f"{1000 * cuts[98]:.1f}",
        "loads timed": len(loads),
        "load P50 ms": f"{1000 * load_cuts[49]:.0f}" if load_cuts else "-",
        "load P99 ms": f"{1000 * load_cuts[98]:.0f}" if load_cuts else "-",
    }


def ratio_row(quiet: dict[str, object], loaded: dict[str, object]) -> dict[str, object]:
    names = ("P50 ms", "P90 ms", "P99 ms")
    ratios = {name: f"{float(str(loaded[name])) / float(str(quiet[name])):.3f}" for name in names}
    return {**dict.fromkeys(quiet, ""), "rounds": "ratio", **ratios}


def warm_up(llm: LLM, cids: list[str]) -> None:
    residency = llm.engine.residency
    for cid in cids:
        assert residency.load_now([cid]), "the pool is too small"
        residency.release([cid])


def run_repeat(llm: LLM, cids: list[str], args: argparse.Namespace) -> Measured:
    measured = Measured()
    loads = ColdLoads(llm.engine, cids[1:], from_source=args.origin == "source")
    while loads.num_loaded < args.loads:
        measured.quiet += run_round(llm, cids[0], args, None)
        measured.loaded += run_round(llm, cids[0], args, loads)
        print(f"{loads.num_loaded} loads", flush=True)
    measured.loads = loads.seconds
    return measured


def run_all(llm: LLM, cids: list[str], args: argparse.Namespace) -> Table:
    everything = Measured()
    table: Table = []
    for number in range(args.repeats):
        measured = run_repeat(llm, cids, args)
        table += measured.rows(str(number + 1))
        everything.add(measured)
    return table + everything.rows("all")


class OtherWork:
    """Measures the CPU time that other processes have used since its creation."""

    def __init__(self) -> None:
        self._began = self._read()

    def describe(self) -> str:
        wall_s, all_s, own_s = (
            now - then for now, then in zip(self._read(), self._began, strict=True)
        )
        return f"{max(0.0, all_s - own_s) / wall_s:.2f} cores" if all_s else "not known"

    def _read(self) -> tuple[float, float, float]:
        stat = Path("/proc/stat")
        ticks = stat.read_text().splitlines()[0].split()[1:] if stat.exists() else ["0"] * 8
        # All but idle (3) and iowait (4).
        busy = sum(int(ticks[field]) for field in (0, 1, 2, 5, 6, 7))
        return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()


def make_llm(args: argparse.Namespace, folder: Path) -> tuple[LLM, list[str]]:
    llm = LLM(
        device="cpu",
        device_memory_bytes=args.pool * MIB,
        host_memory_bytes=512 * MIB,
        disk_space_bytes=8192 * MIB,
        disk_folder=str(folder / "images"),
    )
    base = llm.engine.catalog.base
    cids = []
    for number in range(args.loads + 1):
        path = folder / f"rank-{args.rank}-{number}"
        if not path.exists():
            make_adapter(path, base, rank=args.rank, seed=number)
        cids.append(llm.register_adapter(path))
        llm.engine.memory.tiers.host.drop(cids[-1])
    return llm, cids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="steps per round")
    parser.add_argument("--pool", type=int, default=1024, help="pool size in MiB")
    parser.add_argument("--from", dest="origin", choices=("disk", "source"), default="disk")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="folder that keeps the adapters for the next run"
    )
    args = parse_arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        llm, cids = make_llm(args, args.folder or Path(folder))
        machine = describe_machine(str(llm.engine.executor.dtype))
        warm_up(llm, cids)
        others = OtherWork()
        table = run_all(llm, cids, args)
        machine["other programs meanwhile"] = others.describe()
        losses = llm.engine.memory.stalls
        machine["loader"] = LOADER
        machine["before"] = "all adapters were loaded once, so the pool's memory was written"
        machine["step-loop time spent on loads"] = (
            f"{1000 * losses.total_s / max(1, sum(losses.counts)):.2f} ms per step with a load"
        )
        write_table("load-interference", table, machine, args)
        llm.engine.close()


if __name__ == "__main__":
    main()
