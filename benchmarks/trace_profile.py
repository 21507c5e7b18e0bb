"""Where the steps of a trace spend their time on a GPU: base and LoRA, by rows and kernels.

    python -m benchmarks.trace_profile [--scenarios many,few] [--first 300] [--steps 60]

The traces of bench_trace, whose options it has; --steps steps of each run are profiled, from step
--first on. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_report import Section, start_report
from benchmarks.bench_trace import fill_defaults, make_parser
from benchmarks.kernel_shares import StepShares, by_rows, step_shares
from benchmarks.machine import describe_machine
from benchmarks.random_adapters import RandomAdapters
from benchmarks.random_model import is_gpu, make_engine
from benchmarks.report import Table
from benchmarks.trace_scenarios import FEW, TraceBench, slora_adapters
from benchmarks.traffic import Clock, Watch
from loramux.engine.engine import Engine


class ProfilingWatch(Watch):
    """Profiles some of the steps that it sees."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self._profiled = range(first, first + count)
        self._number = 0
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities)
        self.shares: list[StepShares] = []

    def step(self, engine: Engine, clock: Clock) -> None:
        self._number += 1
        if self._number == self._profiled[0]:
            self._profile.start()
        super().step(engine, clock)
        if self._number == self._profiled[-1]:
            torch.cuda.synchronize()
            self._profile.stop()
            self.shares = step_shares(_events(self._profile))


def _events(profile: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(target))
        events: list[dict[str, Any]] = json.loads(target.read_text())["traceEvents"]
    return events


def profiled(bench: TraceBench, name: str, cids: Sequence[str], num_layers: int) -> Section:
    """A base run, and a run on these adapters."""
    options = bench.options
    bench.warm(cids)
    arrivals = bench.slora_lengths(len(cids), options.alpha)
    rows: Table = []
    for run, of_run in (("base", ()), ("LoRA", cids)):
        watch = ProfilingWatch(options.first, options.steps)
        bench.saturated(arrivals, of_run, watch)
        if not watch.shares:
            raise SystemExit(f"The {run} run has too few steps: more --requests, or less --first.")
        rows += [{"run": run, **line} for line in by_rows(watch.shares, num_layers)]
    note = "By kernel: microseconds a layer, from where all ahead of it have ended to its own end."
    return Section(title=f"Steps of the trace {name}", rows=rows, notes=(note,))


def main() -> None:
    parser = make_parser()
    parser.prog, parser.description = "trace_profile", __doc__
    parser.add_argument("--first", type=int, default=300, help="the first step that is profiled")
    parser.add_argument("--steps", type=int, default=60, help="that are profiled")
    parser.set_defaults(scenarios=["many", "few"])
    arguments = parser.parse_args()
    fill_defaults(arguments)
    if not is_gpu(arguments):
        parser.error("there are no kernels to profile on a CPU: --device cuda")
    traces = {"many": slora_adapters(arguments.many), "few": FEW}
    if unknown := set(arguments.scenarios) - set(traces):
        parser.error(f"only {' and '.join(traces)} are profiled, not {', '.join(sorted(unknown))}")
    out = start_report("profile", arguments, describe_machine(arguments.dtype, arguments.device))
    model, engine = make_engine(arguments)
    bench = TraceBench(engine, RandomAdapters(engine, num_images=arguments.images), arguments)
    for name in arguments.scenarios:
        cids = bench.adapters.add(*traces[name])
        out.add(profiled(bench, name, cids, model.config.num_layers))
        bench.adapters.forget(cids)
    engine.close()
    out.finish()


if __name__ == "__main__":
    main()
