"""Workloads of S-LoRA and Punica on the whole engine, beside base-only runs of the same engine.

    python -m benchmarks.bench_trace [--scenarios few,many,registered,loads,base,slora,punica]

few         8 adapters on every linear layer, against the base (the batch full all the time)
many        S-LoRA's trace over 1,000 adapters, q,k,v,o, ranks 8 to 64, against the base
registered  100, 2,000 and 10,000 registered adapters, rank 16
loads       adapters from host memory: time until schedulable, and what running streams feel
base        base requests while many adapters are there, against none
slora       S-LoRA's trace in real time: first token, between tokens, SLO
punica      Punica's four popularities, against the base

In and out lengths are drawn from --tokens. On a CPU a small model, on a GPU the shapes of
Llama-3.1-8B; all weights are random. Each section is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmarks.bench_report import (
    Section,
    add_output_options,
    draw,
    names,
    numbers,
    start_report,
)
from benchmarks.cold_loads import cold_loads
from benchmarks.machine import describe_machine
from benchmarks.random_adapters import RandomAdapters
from benchmarks.random_model import add_engine_options, is_gpu, make_engine
from benchmarks.trace_scenarios import (
    TraceBench,
    base_only,
    few,
    many,
    punica_traces,
    registered,
    slora_trace,
)
from loramux.engine.garbage import FullCollections

SCENARIOS: dict[str, Callable[[TraceBench], Section]] = {
    "few": few,
    "many": many,
    "registered": registered,
    "loads": cold_loads,
    "base": base_only,
    "slora": slora_trace,
    "punica": punica_traces,
}
# name: (on a GPU, on a CPU)
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

# Of requests, beside the backlog: one comes before the window opens.
NUM_BATCHES = 5


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1 must wait, else no place is filled")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench trace", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    every = [name for name in SCENARIOS if name not in ("slora", "punica")]
    add("--scenarios", type=names(list(SCENARIOS)), default=every)
    add("--requests", type=int, help="of a run with a full batch; default: five batches of them")
    add("--backlog", type=positive, help="that always wait then; default: as many as run at once")
    add("--repeats", type=int, default=1, help="pairs of base and LoRA runs")
    add("--tokens", type=numbers, metavar="LOW,HIGH", help="prompts and answers: LOW to HIGH - 1")
    add("--alpha", type=float, default=1.0, help="popularity; 1: uniform, near 0: skewed")
    add("--many", type=int, help="adapters of many, slora and base")
    add("--registered", type=numbers, help="numbers of adapters to compare")
    add("--images", type=int, default=16, help="byte images that adapters of one rank share")
    add("--rate", type=float, help="slora: requests/s")
    add("--cv", type=float, default=1.0, help="slora: burstiness of arrivals")
    add("--seconds", type=float, help="slora: length of the trace")
    add("--punica-tokens", type=int, help="punica: longest prompt and answer together")
    add("--loads", type=int, help="loads: how many while the engine is idle")
    add("--load-rates", type=numbers, default=[1, 20], help="loads: per second, beside none")
    add("--round-s", type=float, help="loads: seconds of a round")
    add("--rounds", type=int, default=2, help="loads: of each kind")
    add("--streams", type=int, help="loads: that run meanwhile")
    add("--stream-prompt", type=int, help="loads: tokens of a stream's prompt")
    add_engine_options(parser)
    parser.set_defaults(max_sequences=None)
    add_output_options(parser)
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
    arguments = make_parser().parse_args()
    if arguments.plot_from is not None:
        draw(arguments.plot_from)
        return
    fill_defaults(arguments)
    out = start_report("trace", arguments, describe_machine(arguments.dtype, arguments.device))
    _, engine = make_engine(arguments)
    adapters = RandomAdapters(engine, num_images=arguments.images)
    bench = TraceBench(engine, adapters, arguments)
    with FullCollections(owns_process=True):  # As a server does.
        for name in arguments.scenarios:
            began = time.perf_counter()
            out.add(SCENARIOS[name](bench))
            print(f"({name}: {time.perf_counter() - began:.0f} s)", flush=True)
    engine.close()
    out.finish()


if __name__ == "__main__":
    main()
