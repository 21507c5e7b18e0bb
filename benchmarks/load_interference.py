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

    def advance(self) -> None:
        """Called between steps: takes note of what has come, and starts the next."""
        residency = self._engine.residency
        if self._current is not None:
            if not residency.is_ready([self._current]):
                return
            self.seconds.append(time.perf_counter() - self._began)
            residency.unwant([self._current])
        self._current = next(self._cids, None)
        if self._current is not None:
            if self._current in residency:
                residency.evict(owner_of(self._current))
            self._began = time.perf_counter()
            self._engine.memory.tiers.host.drop(self._current)
            if self._from_source and self._engine.memory.tiers.disk is not None:
                self._engine.memory.tiers.disk.drop(self._current)
            residency.want([self._current])

    @property
    def is_over(self) -> bool:
        return self._current is None


def run_round(engine: Engine, num_steps: int, loads: ColdLoads | None) -> list[float]:
    gaps = []
    for _ in range(num_steps):
        began = time.perf_counter()
        if loads is not None:
            loads.advance()
            if loads.is_over:
                break
        engine.step()
        gaps.append(time.perf_counter() - began)
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
        start_streams(llm, cids[0], args.streams, 2 * args.steps + 8)
        quiet += run_round(llm.engine, args.steps, None)
        loaded += run_round(llm.engine, args.steps, loads)
        for number in range(args.streams):
            llm.engine.abort(f"stream-{number}")
        print(f"{len(loads.seconds)} loads", flush=True)
    table: Table = [row("no loads", quiet, []), row("cold loads", loaded, loads.seconds)]
    return [*table, ratio_row(*table)]


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
        path = make_adapter(folder / str(number), base, rank=args.rank, seed=number)
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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm, cids = make_llm(args, Path(folder))
        machine = describe_machine(str(llm.engine.runner.dtype))
        table = [line for _ in range(args.repeats) for line in run_repeat(llm, cids, args)]
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
