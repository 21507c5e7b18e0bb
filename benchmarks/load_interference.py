"""What running streams feel of loads: gaps between tokens, with and without cold adapters coming.

    python -m benchmarks.load_interference --loads 100 [--repeats 3]

Some streams decode on one adapter. In every other round cold adapters are brought from the disk
tier (or, with --from source, from their PEFT folders) through host memory into pool pages, a new
one as soon as the last has come, while the streams go on; nothing else differs. Rounds of both
kinds alternate, so that a busy minute of the machine falls on both. A repeat loads them all again,
from where they were cold at first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.adapters import make_adapter
from benchmarks.machine import describe_machine
from benchmarks.report import Table, print_table, write_report
from loramux import LLM, SamplingParams
from loramux.engine.engine import Engine
from loramux.memory.offers import owner_of
from loramux.types import Request

MIB = 2**20
LOADER = "2 threads of the engine's process, SCHED_IDLE; the step loop has all cores"


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
    # All prompts are computed before anything is timed.
    while llm.engine.scheduler.num_waiting:
        llm.engine.step()
    llm.engine.step()


class ColdLoads:
    """Keeps one load going at a time; each adapter is as cold as --from says."""

    def __init__(self, engine: Engine, cids: list[str], *, from_source: bool) -> None:
        self._engine = engine
        self._cids: Iterator[str] = iter(cids)
        self._current: str | None = None
        self._from_source = from_source
        self.seconds: list[float] = []
        self._began = 0.0

    def advance(self) -> bool:
        """Called between steps: notes what has come, starts the next; False: all have come."""
        residency = self._engine.residency
        if self._current is not None:
            if not residency.is_ready([self._current]):
                return True
            self._take()
        self._current = next(self._cids, None)
        if self._current is not None:
            if self._current in residency:
                residency.evict(owner_of(self._current))
            self._began = time.perf_counter()
            self._engine.memory.tiers.host.drop(self._current)
            if self._from_source and self._engine.memory.tiers.disk is not None:
                self._engine.memory.tiers.disk.drop(self._current)
            residency.want([self._current])
        return self._current is not None

    def settle(self) -> None:
        """Waits for a load that is under way: a round without loads has none."""
        while self._current is not None and not self._engine.residency.is_ready([self._current]):
            self._engine.residency.poll(timeout_s=0.05)
        if self._current is not None:
            self._take()
            self._current = None

    def _take(self) -> None:
        assert self._current is not None
        self.seconds.append(time.perf_counter() - self._began)
        self._engine.residency.unwant([self._current])


def run_round(llm: LLM, cid: str, args: argparse.Namespace, loads: ColdLoads | None) -> list[float]:
    """Gaps between tokens of new streams: every round computes the same tokens."""
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
        loads.settle()
    for number in range(args.streams):
        engine.abort(f"stream-{number}")
    return gaps


def row(name: str, gaps: list[float], loads: list[float]) -> dict[str, object]:
    cuts = statistics.quantiles(gaps, n=100)
    return {
        "round": name,
        "steps": len(gaps),
        "P50 ms": f"{1000 * cuts[49]:.1f}",
        "P90 ms": f"{1000 * cuts[89]:.1f}",
        "P99 ms": f"{1000 * cuts[98]:.1f}",
        "loads": len(loads),
        "load P50 ms": f"{1000 * statistics.median(loads):.0f}" if loads else "-",
        "load max ms": f"{1000 * max(loads):.0f}" if loads else "-",
    }


def ratio_row(quiet: dict[str, object], loaded: dict[str, object]) -> dict[str, object]:
    names = ("P50 ms", "P90 ms", "P99 ms")
    ratios = {name: f"{float(str(loaded[name])) / float(str(quiet[name])):.3f}" for name in names}
    return {**dict.fromkeys(quiet, ""), "round": "ratio", **ratios}


def run_repeat(llm: LLM, cids: list[str], args: argparse.Namespace) -> Table:
    loads = ColdLoads(llm.engine, cids[1:], from_source=args.origin == "source")
    quiet: list[float] = []
    loaded: list[float] = []
    while len(loads.seconds) < args.loads:
        quiet += run_round(llm, cids[0], args, None)
        loaded += run_round(llm, cids[0], args, loads)
        print(f"{len(loads.seconds)} loads", flush=True)
    table: Table = [row("no loads", quiet, []), row("cold loads", loaded, loads.seconds)]
    return [*table, ratio_row(*table)]


class OtherWork:
    """How much of the machine others have used since this was made; a figure wants very little."""

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
        # All but idle (3) and waiting for a disk (4).
        busy = sum(int(ticks[field]) for field in (0, 1, 2, 5, 6, 7))
        return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()


def make_llm(args: argparse.Namespace, folder: Path) -> tuple[LLM, list[str]]:
    llm = LLM(
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
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--pool", type=int, default=1024, help="MiB")
    parser.add_argument("--from", dest="origin", choices=("disk", "source"), default="disk")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps the adapters for the next run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm, cids = make_llm(args, args.folder or Path(folder))
        machine = describe_machine(str(llm.engine.runner.dtype))
        others = OtherWork()
        table = [line for _ in range(args.repeats) for line in run_repeat(llm, cids, args)]
        machine["other programs meanwhile"] = others.describe()
        losses = llm.engine.memory.losses
        machine["loader"] = LOADER
        machine["time of the step loop spent on loads"] = (
            f"{1000 * losses.total_s / max(1, sum(losses.counts)):.2f} ms a step that had one"
        )
        print_table(table, machine)
        write_report("load-interference", table, machine, args)
        llm.engine.close()


if __name__ == "__main__":
    main()
