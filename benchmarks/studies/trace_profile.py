"""Where the steps of a trace spend their time on a GPU: base and LoRA, by rows and kernels.

    python -m benchmarks.studies.trace_profile [--scenarios many,few] [--first 300] [--steps 60]

The traces of bench_trace, whose options it has; --steps steps of each run are profiled, from step
--first on. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import RandomAdapters, is_gpu, make_engine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from benchmarks.lib.scenarios import FEW, TraceBench, slora_adapters
from benchmarks.lib.traffic import Clock, Watch
from benchmarks.trace import fill_defaults, make_parser
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
    arguments = parse_arguments(parser)
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


Event = Mapping[str, Any]
"""Of a Chrome trace: name, cat, ts and dur in microseconds, args with stream and grid."""

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAST_OF_STEP = ("_choose", "_draw")
# The first of these that a kernel's name contains says what it is; any other is "other".
KINDS = {
    "nvjet": "product",
    "gemm": "product",
    "splitK": "product",
    "product": "product",
    "gate_up": "product",
    "shrink": "shrink",
    "expand": "expand",
    "attend": "attention",
    "rotate_write": "rotation",
    "activate_mul": "activation",
    "add_norm": "norm",
    "_sum_parts": "sampling",
    "_choose": "sampling",
    "_draw": "sampling",
}


@dataclass(frozen=True, slots=True)
class StepShares:
    """One step: its rows, its length and its parts, in microseconds."""

    num_rows: int
    length: float
    parts: Counter[str]


def kind_of(event: Event) -> str:
    if event["cat"] != "kernel":
        return "copy"
    return next((kind for part, kind in KINDS.items() if part in event["name"]), "other")


def step_shares(events: Iterable[Event]) -> list[StepShares]:
    """Of the stream that has the most kernels; the first step is left out: it may be cut off."""
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE_WORK]
    if not work:
        return []
    stream = Counter(e["args"].get("stream") for e in work).most_common(1)[0][0]
    ours = sorted((e for e in work if e["args"].get("stream") == stream), key=lambda e: e["ts"])
    steps = list(_split(ours))
    last = _end(steps[0]) if steps else 0.0
    shares = []
    for step in steps[1:]:
        shares.append(_share(step, last))
        last = max(last, _end(step))
    return shares


def _split(events: Sequence[Event]) -> Iterable[list[Event]]:
    step: list[Event] = []
    for event in events:
        step.append(event)
        if any(name in event["name"] for name in LAST_OF_STEP):
            yield step
            step = []


def _end(step: Sequence[Event]) -> float:
    return float(max(event["ts"] + event["dur"] for event in step))


def _share(step: Sequence[Event], began: float) -> StepShares:
    parts: Counter[str] = Counter()
    last = began
    for event in step:
        end = event["ts"] + event["dur"]
        parts["gaps"] += max(0.0, event["ts"] - last)
        parts[kind_of(event)] += max(0.0, end - max(last, event["ts"]))
        last = max(last, end)
    norms = [e["args"]["grid"][0] for e in step if kind_of(e) == "norm"]
    return StepShares(max(norms, default=0), last - began, parts)


def by_rows(steps: Iterable[StepShares], num_layers: int) -> list[dict[str, object]]:
    """A line for every number of rows: steps, their length, and microseconds a layer by part."""
    groups: dict[int, list[StepShares]] = defaultdict(list)
    for step in steps:
        groups[step.num_rows].append(step)
    lines: list[dict[str, object]] = []
    for num_rows, members in sorted(groups.items()):
        total: Counter[str] = sum((step.parts for step in members), Counter())
        mean_ms = sum(step.length for step in members) / len(members) / 1e3
        line: dict[str, object] = {"rows": num_rows, "steps": len(members), "ms a step": mean_ms}
        names = sorted({*KINDS.values(), "copy", "other", "gaps"})
        lines.append(line | {n: total[n] / len(members) / num_layers for n in names if total[n]})
    return lines


if __name__ == "__main__":
    main()
