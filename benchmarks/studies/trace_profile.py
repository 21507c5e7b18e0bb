"""Profile the steps of a trace on a GPU: base and LoRA, by tokens per step and kind of kernel.

    python -m benchmarks.studies.trace_profile [--scenarios many,few] [--first 300] [--steps 60]

It takes the options of benchmarks/trace.py, and profiles --steps steps of each run beginning with
step --first. Kernels overlap: one may start under PDL while its predecessor runs, and wait. So a
kernel counts from the end of all earlier kernels to its own end, and the parts of a step add up to
the step. It needs an NVIDIA GPU.
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

Event = Mapping[str, Any]
"""An event of a Chrome trace: name, cat, ts and dur in microseconds, args with stream and grid."""

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAST_OF_STEP = ("_choose", "_draw")
KINDS = {
    "nvjet": "GEMM",
    "gemm": "GEMM",
    "splitK": "GEMM",
    "shrink": "shrink",
    "expand": "expand",
    "attend": "attention",
    "rotate_": "RoPE",
    "activate_": "SwiGLU",
    "add_norm": "norm",
    "swiglu_kernel": "GEMM",
    "rows_kernel": "GEMM",
    "tile_kernel": "GEMM",
    "_sum_parts": "sampling",
    "_choose": "sampling",
    "_draw": "sampling",
}
"""Part of a kernel's name: its kind. The first match counts; any other kernel is "other"."""
LIBRARY_KERNELS = ("nvjet", "gemm", "splitK")


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step: its tokens, its microseconds, and the microseconds of each kind of kernel."""

    num_tokens: int
    length: float
    parts: Counter[str]


class ProfilingWatch(Watch):
    """A watch that profiles some of its steps."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self._profiled = range(first, first + count)
        self._number = 0
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities)
        self.steps: list[StepProfile] = []

    def step(self, engine: Engine, clock: Clock) -> None:
        self._number += 1
        if self._number == self._profiled[0]:
            self._profile.start()
        super().step(engine, clock)
        if self._number == self._profiled[-1]:
            torch.cuda.synchronize()
            self._profile.stop()
            self.steps = step_profiles(_events(self._profile))


def _events(profile: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(target))
        events: list[dict[str, Any]] = json.loads(target.read_text())["traceEvents"]
    return events


def kind_of(event: Event) -> str:
    if event["cat"] != "kernel":
        return "copy"
    return next((kind for part, kind in KINDS.items() if part in event["name"]), "other")


def step_profiles(events: Iterable[Event]) -> list[StepProfile]:
    """Split the busiest stream into steps, without the first step, which may be incomplete."""
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE_WORK]
    if not work:
        return []
    stream = Counter(e["args"].get("stream") for e in work).most_common(1)[0][0]
    ours = sorted((e for e in work if e["args"].get("stream") == stream), key=lambda e: e["ts"])
    steps = list(_split(ours))
    last = _end(steps[0]) if steps else 0.0
    profiles = []
    for step in steps[1:]:
        profiles.append(_profile_of(step, last))
        last = max(last, _end(step))
    return profiles


def _split(events: Sequence[Event]) -> Iterable[list[Event]]:
    step: list[Event] = []
    for event in events:
        step.append(event)
        if any(name in event["name"] for name in LAST_OF_STEP):
            yield step
            step = []


def _end(step: Sequence[Event]) -> float:
    return float(max(event["ts"] + event["dur"] for event in step))


def _profile_of(step: Sequence[Event], began: float) -> StepProfile:
    parts: Counter[str] = Counter()
    last = began
    for event in step:
        end = event["ts"] + event["dur"]
        parts["gaps"] += max(0.0, event["ts"] - last)
        parts[kind_of(event)] += max(0.0, end - max(last, event["ts"]))
        last = max(last, end)
    # A norm has one CTA per token.
    norms = [e["args"]["grid"][0] for e in step if kind_of(e) == "norm"]
    return StepProfile(max(norms, default=0), last - began, parts)


def by_tokens(steps: Iterable[StepProfile], num_layers: int) -> Table:
    """Average the steps of equal size: milliseconds per step, and microseconds per layer."""
    groups: dict[int, list[StepProfile]] = defaultdict(list)
    for step in steps:
        groups[step.num_tokens].append(step)
    rows: Table = []
    for num_tokens, members in sorted(groups.items()):
        total: Counter[str] = sum((step.parts for step in members), Counter())
        mean_ms = sum(step.length for step in members) / len(members) / 1e3
        row: dict[str, object] = {"tokens": num_tokens, "steps": len(members), "step ms": mean_ms}
        names = sorted({*KINDS.values(), "copy", "other", "gaps"})
        rows.append(row | {n: total[n] / len(members) / num_layers for n in names if total[n]})
    return rows


def profile_scenario(bench: TraceBench, name: str, cids: Sequence[str], num_layers: int) -> Section:
    """Profile a base-only run and a run on these adapters."""
    options = bench.options
    bench.warm(cids)
    arrivals = bench.slora_lengths(len(cids), options.alpha)
    rows: Table = []
    for run, adapters in (("base", ()), ("LoRA", cids)):
        watch = ProfilingWatch(options.first, options.steps)
        bench.saturated(arrivals, adapters, watch)
        if not watch.steps:
            raise SystemExit(f"The {run} run has too few steps: raise --requests or lower --first.")
        rows += [{"run": run, **row} for row in by_tokens(watch.steps, num_layers)]
    note = "By kernel: us per layer, from the end of all earlier kernels to its own end."
    return Section(title=f"Steps of the scenario {name}", rows=rows, notes=(note,))


def main() -> None:
    parser = make_parser()
    parser.prog, parser.description = "bench trace-profile", __doc__
    parser.add_argument("--first", type=int, default=300, help="first profiled step")
    parser.add_argument("--steps", type=int, default=60, help="number of profiled steps")
    parser.set_defaults(scenarios=["many", "few"])
    arguments = parse_arguments(parser)
    fill_defaults(arguments)
    if not is_gpu(arguments):
        parser.error("a CPU has no kernels to profile: --device cuda")
    adapters = {"many": slora_adapters(arguments.many), "few": FEW}
    if unknown := set(arguments.scenarios) - set(adapters):
        wrong = ", ".join(sorted(unknown))
        parser.error(f"only {' and '.join(adapters)} are profiled, not {wrong}")
    out = start_report("profile", arguments, describe_machine(arguments.dtype, arguments.device))
    model, engine = make_engine(arguments)
    bench = TraceBench(engine, RandomAdapters(engine, num_images=arguments.images), arguments)
    for name in arguments.scenarios:
        cids = bench.adapters.add(*adapters[name])
        out.add(profile_scenario(bench, name, cids, model.config.num_layers))
        bench.adapters.forget(cids)
    engine.close()
    out.finish()


if __name__ == "__main__":
    main()
