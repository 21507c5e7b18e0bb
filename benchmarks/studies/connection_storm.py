"""Measure the rate of streams beside idle connections, slow readers and bodies without an end.

    python -m benchmarks.studies.connection_storm [--streams 8] [--rounds 5]

Rounds with and without the storm alternate on one server, so that other work on the machine affects
both. The storm runs in a process of its own (tests/storm.py), which opens connections again that
the server ends, and is held some seconds before its round begins.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.paired_rounds import FIRST_TOKEN, LAST_TOKEN, body, interval
from benchmarks.lib.raw_stream import RawStream
from benchmarks.lib.report import parse_arguments, write_table
from benchmarks.studies.slow_streams import resident_mib
from tests.serve_factory import RunningServer, running_server
from tests.storm import num_descriptors, storm

CALM, STORM = "calm", "storm"
# Requests of the connections that were just opened are answered by then.
SETTLE_S = 5.0


def main() -> None:
    args = options()
    machine = describe_machine(args.dtype)
    flags = ["--dtype", args.dtype, "--device-memory", "512MiB", "--served-model-name", "base"]
    flags += ["--no-prefix-cache", *(["--model", args.model] if args.model else [])]
    rates: dict[str, list[float]] = {CALM: [], STORM: []}
    with tempfile.TemporaryDirectory() as name, running_server(Path(name) / "log", *flags) as one:
        run_round(one, args, -1)
        before = resident_mib(one.process.pid)
        most = Most()
        for number in range(args.rounds):
            for kind in (CALM, STORM) if number % 2 == 0 else (STORM, CALM):
                with held(one, args) if kind == STORM else nullcontext():
                    time.sleep(SETTLE_S)
                    rates[kind].append(run_round(one, args, number))
                    most.look_at(one.process.pid)
                print(f"  {kind:6s} {rates[kind][-1]:8.1f} tok/s", flush=True)
    ratios = [b / a for a, b in zip(rates[CALM], rates[STORM], strict=True)]
    low, high = interval(ratios)
    row = {
        "streams": args.streams,
        "calm tok/s": round(statistics.median(rates[CALM]), 1),
        "storm tok/s": round(statistics.median(rates[STORM]), 1),
        "median of ratios": round(statistics.median(ratios), 4),
        "95% interval": f"{low:.4f} to {high:.4f}",
        "rounds": len(ratios),
        "server MiB before": round(before),
        "server MiB at most": round(most.mib),
        "descriptors at most": most.descriptors,
    }
    write_table("connection-storm", [row], machine, args)


class Most:
    """The most memory and descriptors of the server so far."""

    def __init__(self) -> None:
        self.mib, self.descriptors = 0.0, 0

    def look_at(self, pid: int) -> None:
        self.mib = max(self.mib, resident_mib(pid))
        self.descriptors = max(self.descriptors, num_descriptors(pid))


def held(server: RunningServer, args: argparse.Namespace) -> AbstractContextManager[None]:
    return storm(server.url, args.idle, args.slow, args.endless)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--input", type=int, default=16)
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--slow", type=int, default=500)
    parser.add_argument("--endless", type=int, default=200)
    return parse_arguments(parser)


def run_round(server: RunningServer, args: argparse.Namespace, seed: int) -> float:
    """Return the tokens per second of all streams together, which must end as they should."""
    source = random.Random(seed)
    prompts = [
        [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(args.input)]
        for _ in range(args.streams)
    ]
    start_s = time.perf_counter()
    asyncio.run(read_all(server.url, prompts, args.output))
    return float(args.streams * args.output / (time.perf_counter() - start_s))


async def read_all(url: str, prompts: list[list[int]], num_output: int) -> None:
    streams = [RawStream(url, body(prompt, num_output)) for prompt in prompts]
    try:
        await asyncio.gather(*(one.send() for one in streams))
        await asyncio.gather(*(one.read_all() for one in streams))
    finally:
        for one in streams:
            one.close()
    for one in streams:
        answer = one.answer()
        assert answer.is_whole and answer.num_tokens == num_output, answer


if __name__ == "__main__":
    main()
