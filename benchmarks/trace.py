"""Run the workloads of S-LoRA and Punica on the whole engine, against base-only runs.

    python -m benchmarks.trace [--scenarios few,many,registered,loads,base,slora,punica]

few         8 adapters on every linear layer against base-only, with a full batch
many        S-LoRA's trace over 1,000 adapters, q,k,v,o, ranks 8 to 64, against base-only
registered  100, 2,000 and 10,000 registered adapters of rank 16
loads       adapters in host memory: time until schedulable, inter-token latency meanwhile
base        base requests with many adapters on the device against none
slora       S-LoRA's trace in real time: first token, inter-token latency, SLO attainment
punica      Punica's four popularities against base-only

Prompt and output lengths are drawn from --tokens. All weights are random; a CPU runs a small model,
a GPU the shapes of Llama-3.1-8B. Each section is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.lib.cold_loads import cold_loads
from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import RandomAdapters, add_engine_options, is_gpu, make_engine
from benchmarks.lib.report import (
    Section,
    names,
    numbers,
    parse_arguments,
    start_report,
)
from benchmarks.lib.scenarios import (
    TraceBench,
    base_only,
    few,
    many,
    punica_traces,
    registered,
    slora_trace,
)
from loramux.engine.gc_control import FullCollections

SCENARIOS: dict[str, Callable[[TraceBench], Section]] = {
    "few": few,
    "many": many,
    "registered": registered,
    "loads": cold_loads,
    "base": base_only,
    "slora": slora_trace,
    "punica": punica_traces,
}
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "model": ("llama-3.1-8b", "small"),
    "max_sequences": (256, 16),
    "tokens": ([8, 512], [4, 32]),
    "many": (1000, 50),
    "registered": ([100, 2000, 10000], [10, 50, 200]),
    "punica_tokens": (512, 48),
    "rate": (24.0, 8.0),
    "seconds": (15.0, 4.0),
    "loads": (100, 20),
    "round_s": (3.0, 1.0),
    "streams": (32, 4),
    "stream_prompt": (256, 16),
}
"""Option: (default on a GPU, default on a CPU)."""
NUM_BATCHES = 5
"""Batches of requests in a run, beside the backlog; the first precedes the measured window."""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1 request must wait")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench trace", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    every = [name for name in SCENARIOS if name not in ("slora", "punica")]
    add("--scenarios", type=names(list(SCENARIOS)), default=every)
    add("--requests", type=int, help="requests of a run with a full batch (default: five batches)")
    add("--backlog", type=positive, help="requests that always wait (default: the batch size)")
    add("--repeats", type=int, default=1, help="pairs of base and LoRA runs")
    add("--base-repeats", type=int, default=2, help="base: pairs of runs, LoRA off and on")
    add("--tokens", type=numbers, metavar="LOW,HIGH", help="prompt and output: LOW to HIGH - 1")
    add("--alpha", type=float, default=1.0, help="popularity: 1 is uniform, near 0 skewed")
    add("--many", type=int, help="adapters in many, slora and base")
    add("--registered", type=numbers, help="numbers of adapters to compare")
    add("--images", type=int, default=16, help="weight buffers that adapters of one rank share")
    add("--rate", type=float, help="slora: requests/s")
    add("--cv", type=float, default=1.0, help="slora: burstiness of arrivals")
    add("--seconds", type=float, help="slora: length of the trace")
    add("--punica-tokens", type=int, help="punica: most tokens of prompt and output")
    add("--loads", type=int, help="loads: number of loads into an idle engine")
    add("--load-rates", type=numbers, default=[1, 20], help="loads: loads per second, beside 0")
    add("--round-s", type=float, help="loads: seconds per round")
    add("--rounds", type=int, default=2, help="loads: rounds per rate")
    add("--streams", type=int, help="loads: streams that decode meanwhile")
    add("--stream-prompt", type=int, help="loads: prompt tokens of a stream")
    add_engine_options(parser)
    parser.set_defaults(max_sequences=None)
    return parser


def fill_defaults(arguments: argparse.Namespace) -> None:
    for name, (on_gpu, on_cpu) in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, on_gpu if is_gpu(arguments) else on_cpu)
    if arguments.backlog is None:
        arguments.backlog = arguments.max_sequences
    if arguments.requests is None:
        arguments.requests = NUM_BATCHES * arguments.max_sequences + arguments.backlog


def main() -> None:
    arguments = parse_arguments(make_parser())
    fill_defaults(arguments)
    out = start_report("trace", arguments, describe_machine(arguments.dtype, arguments.device))
    _, engine = make_engine(arguments)
    adapters = RandomAdapters(engine, num_images=arguments.images)
    bench = TraceBench(engine, adapters, arguments)
    with FullCollections(owns_process=True):  # As the server does.
        for name in arguments.scenarios:
            began = time.perf_counter()
            out.add(replace(SCENARIOS[name](bench), name=name))
            print(f"({name}: {time.perf_counter() - began:.0f} s)", flush=True)
    engine.close()
    out.finish()


if __name__ == "__main__":
    main()
