"""Where the steps of a trace spend their time on a GPU: base and LoRA, by rows and kernels.

    python -m benchmarks.trace_profile [--scenarios many,few] [--first 300] [--steps 60]

The traces of bench_trace, whose options it has; --steps steps of each run are profiled, from step
--first on. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_report import Section, start_report
from benchmarks.bench_trace import fill_defaults, make_parser
from benchmarks.kernel_shares import StepShares, by_rows, step_shares
from benchmarks.machine import describe_machine
from benchmarks.random_adapters import RandomAdapters
from benchmarks.random_model import is_gpu, make_engine
from benchmarks.trace_scenarios import RANK, TraceBench
from benchmarks.workloads import SLORA_RANKS, rank_of
from loramux.engine.engine import Engine


class ProfiledSteps:
    """Steps of an engine, of which some are profiled."""

    def __init__(self, engine: Engine, first: int, count: int) -> None:
        self._step: Callable[[], Any] = engine.step
        self._first = first
        self._last = first + count
        self._number = 0
        self._profile: Any = None
        self.shares: list[StepShares] = []

    def __call__(self) -> Any:
        self._number += 1
        if self._number == self._first:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
        events = self._step()
        if self._number == self._last and self._profile is not None:
            torch.cuda.synchronize()
            self._profile.stop()
            self.shares = step_shares(_events(self._profile))
        return events


def _events(profile: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(target))
        events: list[dict[str, Any]] = json.loads(target.read_text())["traceEvents"]
    return events


def profiled(
    bench: TraceBench, name: str, ranks: list[int], sites: str, num_layers: int
) -> Section:
    """A base run and a run on adapters of these ranks."""
    options, engine = bench.options, bench.engine
    cids = bench.adapters.add(ranks, sites)
    bench.warm(cids)
    arrivals = bench.slora_lengths(len(ranks), options.alpha)
    rows: list[dict[str, object]] = []
    for run, of_run in (("base", []), ("LoRA", cids)):
        steps = ProfiledSteps(engine, options.first, options.steps)
        engine.step = steps  # type: ignore[method-assign]
        try:
            bench.saturated(arrivals, of_run)
        finally:
            del engine.step
        lines = by_rows(steps.shares, num_layers)
        rows += [{"run": run, **line} for line in lines]
    bench.adapters.forget(cids)
    note = "By kernel: microseconds a layer, from where all ahead of it have ended to its own end."
    return Section(title=f"Steps of the trace {name}", rows=rows, notes=(note,))


def main() -> None:
    parser = make_parser()
    parser.prog, parser.description = "trace_profile", __doc__
    parser.add_argument("--first", type=int, default=300, help="step that is profiled")
    parser.add_argument("--steps", type=int, default=60, help="that are profiled")
    parser.set_defaults(scenarios=["many", "few"])
    arguments = parser.parse_args()
    fill_defaults(arguments)
    if not is_gpu(arguments):
        parser.error("there are no kernels to profile on a CPU: --device cuda")
    out = start_report("profile", arguments, describe_machine(arguments.dtype, arguments.device))
    model, engine = make_engine(arguments)
    bench = TraceBench(engine, RandomAdapters(engine, num_images=arguments.images), arguments)
    many = [rank_of(number, SLORA_RANKS) for number in range(arguments.many)]
    traces = {"many": (many, "qkvo"), "few": ([RANK] * 8, "all")}
    for name in arguments.scenarios:
        if name in traces:
            out.add(profiled(bench, name, *traces[name], model.config.num_layers))
    engine.close()
    out.finish()


if __name__ == "__main__":
    main()
