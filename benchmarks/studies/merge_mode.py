"""Time a decode step with one adapter unmerged, merged into the weights, and without it.

    python -m benchmarks.studies.merge_mode [--ranks 16 64] [--batches 1 8 32] [--steps 15]

The three variants run on the same tokens and context in alternating order. Times are medians, and
the saving is the median of the differences. Break-even is the number of steps whose savings pay for
the merge. If other processes take the cores, threads wait for each other after every operation, and
the unmerged step has the most operations: measure on an idle machine, or with --threads 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import make_adapter
from benchmarks.lib.report import parse_arguments, write_table
from loramux import LLM, SamplingParams
from loramux.engine.engine import Engine
from loramux.lora.merge import MergedWeights, MergeSource
from loramux.runner.cpu_runner import CpuRunner
from loramux.types.request import Selection
from loramux.types.step import Chunk, Rows, SampleRow, StepPlan

VARIANTS = ("unmerged", "merged", "base")
NUM_BUILDS = 3


@dataclass(frozen=True)
class Merge:
    weights: MergedWeights
    seconds: float


class DecodeSteps:
    """Sequences of one length whose next token can be computed repeatedly."""

    def __init__(self, engine: Engine, selection: Selection, *, batch: int, context: int) -> None:
        self._engine = engine
        self._selection = selection
        self._context = context
        self._runner = _cpu_runner(engine)
        block_tokens = self._runner.kv.block_tokens
        pages_each = -(-(context + 1) // block_tokens)
        self._owner = ("kv", "benchmark")
        pages = engine.pages.allocate(self._owner, batch * pages_each)
        assert pages is not None, "the pool is too small"
        self._page_ids = pages
        self._pages = [pages[i * pages_each : (i + 1) * pages_each] for i in range(batch)]
        for sequence in range(batch):
            tokens = [(7 * sequence + 13 * i) % 1000 + 100 for i in range(context)]
            chunk = Chunk(sequence, tokens, 0, self._pages[sequence], selection)
            self._runner.run(StepPlan((chunk,)))

    def close(self) -> None:
        self._engine.pages.release(self._owner, self._page_ids)

    def run(self, variant: str, weights: MergedWeights) -> tuple[float, list[int]]:
        """Return the seconds of one step and its sampled tokens."""
        runner = self._runner
        # Tokens on merged weights have no adapter left to add.
        plan = self._plan(self._selection if variant == "unmerged" else ())
        runner._lora.merged = weights.sites if variant == "merged" else None
        try:
            start = time.perf_counter()
            result = runner.run(plan)
            return time.perf_counter() - start, [
                token for _, (token,) in sorted(result.accepted.items())
            ]
        finally:
            runner._lora.merged = None

    def _plan(self, selection: Selection) -> StepPlan:
        row = SampleRow(
            params=SamplingParams(temperature=0), seed=0, prompt_token_ids=(), output_token_ids=()
        )
        rows = (Rows(0, 1, row),)
        return StepPlan(
            tuple(
                Chunk(sequence, [101 + sequence], self._context, pages, selection, rows, 1)
                for sequence, pages in enumerate(self._pages)
            )
        )


def _cpu_runner(engine: Engine) -> CpuRunner:
    assert isinstance(engine.executor, CpuRunner)
    return engine.executor


def make_merge(engine: Engine, selection: Selection) -> Merge:
    runner = _cpu_runner(engine)
    source = MergeSource(
        bases=runner._lora.bases,
        deltas=runner.deltas,
    )
    times = []
    for _ in range(NUM_BUILDS):
        weights = MergedWeights(source, selection)
        start = time.perf_counter()
        weights.advance(lambda: True)
        times.append(time.perf_counter() - start)
    return Merge(weights, statistics.median(times))


def measure(steps: DecodeSteps, merge: Merge, num_steps: int) -> dict[str, object]:
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    num_same = 0
    for variant in VARIANTS:
        steps.run(variant, merge.weights)
    for number in range(num_steps):
        shift = number % len(VARIANTS)
        tokens = {}
        for variant in VARIANTS[shift:] + VARIANTS[:shift]:
            seconds, tokens[variant] = steps.run(variant, merge.weights)
            times[variant].append(seconds)
        num_same += tokens["merged"] == tokens["unmerged"]
    return summarize(times, merge, num_same / num_steps)


def summarize(times: dict[str, list[float]], merge: Merge, same: float) -> dict[str, object]:
    pairs = zip(times["unmerged"], times["merged"], strict=True)
    saving_s = statistics.median(slow - fast for slow, fast in pairs)
    unmerged_s = statistics.median(times["unmerged"])
    return {
        **{f"{name} ms": f"{statistics.median(times[name]) * 1e3:.1f}" for name in VARIANTS},
        "saved ms": f"{saving_s * 1e3:.2f}",
        "saved": f"{saving_s / unmerged_s:.1%}",
        "same tokens": f"{same:.0%}",
        "merge s": f"{merge.seconds:.2f}",
        "merged MiB": f"{merge.weights.num_bytes / 2**20:.0f}",
        "break-even steps": f"{merge.seconds / saving_s:.0f}" if saving_s > 0 else "never",
    }


def measure_rank(
    engine: Engine, folder: Path, args: argparse.Namespace, report: Callable[[str], None]
) -> list[dict[str, object]]:
    known = engine.register_adapter(folder)
    selection: Selection = ((known.cid, 1.0),)
    # Load it into pages, where it stays.
    engine.prompt_logits([((101, 102), selection)])
    merge = make_merge(engine, selection)
    rows = []
    for batch in args.batches:
        steps = DecodeSteps(engine, selection, batch=batch, context=args.context)
        row = measure(steps, merge, args.steps)
        steps.close()
        rows.append({"rank": known.rank, "batch": batch, **row})
        report(f"  rank {known.rank:3d}  batch {batch:3d}  {row}")
    return rows


def end_of_run() -> dict[str, str]:
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    # Each thread of this process adds one to the load.
    busy = load > num_cores or load > torch.get_num_threads() + 0.5
    warning = "provisional: other processes were running; measure again on an idle machine"
    return {"load at end": f"{load:.1f}", **({"note": warning} if busy else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    args = parse_arguments(parser)

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    llm = LLM(args.model, device="cpu", device_memory_bytes=2**30)
    machine = describe_machine(str(llm.engine.executor.dtype))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in args.ranks:
            base = llm.engine.catalog.base
            path = make_adapter(Path(folder) / str(rank), base, rank=rank, seed=rank)
            rows += measure_rank(llm.engine, path, args, lambda line: print(line, flush=True))
    machine |= end_of_run()
    write_table("merge-mode", rows, machine, args)


if __name__ == "__main__":
    main()
