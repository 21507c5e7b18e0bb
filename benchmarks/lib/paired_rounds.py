"""Rounds of requests to a server, and the median of ratios of paired rounds."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.raw_stream import RawStream
from tests.serve_factory import RunningServer

FIRST_TOKEN, LAST_TOKEN = 100, 30_000
CONFIDENCE = 0.95
MS_PER_S = 1000.0
NUM_RESAMPLES = 4000


@dataclass(frozen=True)
class Round:
    tokens_per_s: float
    http_ms: float
    """CPU time of the HTTP process per request."""
    all_ms: float
    """CPU time of the HTTP process and the engine per request."""


def run_round(
    server: RunningServer, args: argparse.Namespace, *, seed: int, api_key: str | None = None
) -> Round:
    source = random.Random(seed)
    prompts = [
        [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(args.input)]
        for _ in range(args.requests)
    ]
    http_s, all_s = cpu_seconds(server)
    start_s = time.perf_counter()
    asyncio.run(ask_all(server.url, prompts, args, api_key))
    elapsed_s = time.perf_counter() - start_s
    http_end_s, all_end_s = cpu_seconds(server)
    return Round(
        args.requests * args.output / elapsed_s,
        (http_end_s - http_s) * MS_PER_S / args.requests,
        (all_end_s - all_s) * MS_PER_S / args.requests,
    )


def cpu_seconds(server: RunningServer) -> tuple[float, float]:
    """Return the CPU seconds of the HTTP process, and of it with its engine."""
    process = psutil.Process(server.process.pid)
    used = [_cpu_seconds(one.pid) for one in (process, *process.children(recursive=True))]
    return used[0], sum(used)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process' threads in nanoseconds' resolution; Linux counts it."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


async def ask_all(
    url: str, prompts: list[list[int]], args: argparse.Namespace, api_key: str | None
) -> None:
    slots, num_output = asyncio.Semaphore(args.concurrency), args.output

    async def ask(prompt: list[int]) -> None:
        async with slots:
            stream = RawStream(url, body(prompt, num_output), api_key=api_key)
            try:
                await stream.send()
                await stream.read_all()
            finally:
                stream.close()
            answer = stream.answer()
            assert answer.is_whole and answer.num_tokens == num_output, answer

    await asyncio.gather(*(ask(prompt) for prompt in prompts))


def body(prompt: list[int], num_output: int) -> dict[str, Any]:
    settings = {"max_tokens": num_output, "temperature": 0, "ignore_eos": True}
    return {"model": "base", "prompt": prompt, **settings}


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap confidence interval of the median."""
    source = random.Random(0)
    medians = sorted(
        statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES)
    )
    outside = int(NUM_RESAMPLES * (1 - CONFIDENCE) / 2)
    return medians[outside], medians[-1 - outside]
