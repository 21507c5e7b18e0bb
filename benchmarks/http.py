"""Measure tokens/s over HTTP beside the offline engine, on the base and on several adapters.

    python -m benchmarks.http [--requests 32] [--input 64] [--output 64]

The offline engine runs first in its own process, which ends before the server starts. All requests
are sent at once and streamed; the clock stops at the end of the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import make_adapter
from benchmarks.lib.raw_stream import RawStream
from benchmarks.lib.report import parse_arguments, write_table
from loramux import LLM, LoRARequest, SamplingParams
from tests.serve_factory import running_server

POOL_BYTES = 2 * 2**30
MAX_BATCH_TOKENS = 256
# Token ids of ordinary text in every common vocabulary.
FIRST_TOKEN, LAST_TOKEN = 100, 30_000


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts, of which number i uses adapter i modulo their number, or the base without any."""

    prompts: list[list[int]]
    num_output: int
    folders: list[Path]

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) * self.num_output

    def folder_of(self, index: int) -> Path | None:
        return self.folders[index % len(self.folders)] if self.folders else None


@dataclass(frozen=True)
class Timing:
    tokens_per_s: float
    texts: list[str]


def main() -> None:
    args = options()
    load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as name:
        works = make_works(args, Path(name))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            dtype, offline = pool.submit(run_offline, args, works).result()
        served = run_served(args, works, Path(name) / "server.log")
    table = summarize(works, offline, served)
    machine = {**describe_machine(dtype), "load at start": load}
    write_table("http-throughput", table, machine, args)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the median is taken")
    return parse_arguments(parser)


def make_works(args: argparse.Namespace, folder: Path) -> list[Work]:
    """Make the work of the base and of the adapters, with the same prompts."""
    source = random.Random(0)
    prompts = [
        [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(args.input)]
        for _ in range(args.requests)
    ]
    folders = [folder / f"adapter-{number}" for number in range(args.adapters)]
    return [
        Work(prompts=prompts, num_output=args.output, folders=chosen) for chosen in ([], folders)
    ]


def run_offline(args: argparse.Namespace, works: list[Work]) -> tuple[str, list[Timing]]:
    """Make the adapters; return the engine's dtype and a timing for each work."""
    llm = LLM(
        args.model,
        dtype=args.dtype,
        device_memory_bytes=POOL_BYTES,
        max_batch_tokens=MAX_BATCH_TOKENS,
    )
    for number, folder in enumerate(works[-1].folders):
        make_adapter(folder, llm.engine.catalog.base, rank=args.rank, seed=number)
    timings = [
        measure("offline", work, args.repeats, lambda work: generate(llm, work)) for work in works
    ]
    return str(llm.engine.executor.dtype), timings


def generate(llm: LLM, work: Work) -> list[str]:
    adapters = {folder: LoRARequest(folder.name, 1, str(folder)) for folder in work.folders}
    params = SamplingParams(temperature=0, max_tokens=work.num_output, ignore_eos=True)
    outputs = llm.generate(
        work.prompts,
        params,
        lora_request=[adapters.get(work.folder_of(i)) for i in range(len(work.prompts))],
        use_tqdm=False,
    )
    return [output.outputs[0].text for output in outputs]


def run_served(args: argparse.Namespace, works: list[Work], log: Path) -> list[Timing]:
    flags = ["--dtype", args.dtype, "--device-memory", str(POOL_BYTES)]
    flags += ["--max-batch-tokens", str(MAX_BATCH_TOKENS), "--served-model-name", "base"]
    flags += ["--model", args.model] if args.model else []
    modules = [f"{folder.name}={folder}" for folder in works[-1].folders]
    flags += ["--lora-modules", *modules] if modules else []
    with running_server(log, *flags) as server:
        return [
            measure("HTTP", work, args.repeats, lambda work: asyncio.run(ask(server.url, work)))
            for work in works
        ]


async def ask(url: str, work: Work) -> list[str]:
    """Stream all requests at once and return their texts."""
    streams = [RawStream(url, body(work, index)) for index in range(len(work.prompts))]
    await asyncio.gather(*(read(stream) for stream in streams))
    answers = [stream.answer() for stream in streams]
    for answer in answers:
        assert answer.is_whole and answer.num_tokens == work.num_output, answer
    return [answer.text for answer in answers]


async def read(stream: RawStream) -> None:
    try:
        await stream.send()
        await stream.read_all()
    finally:
        stream.close()


def body(work: Work, index: int) -> dict[str, Any]:
    folder = work.folder_of(index)
    return {
        "model": folder.name if folder else "base",
        "prompt": work.prompts[index],
        "max_tokens": work.num_output,
        "temperature": 0,
        "ignore_eos": True,
    }


def measure(system: str, work: Work, repeats: int, run: Callable[[Work], list[str]]) -> Timing:
    # The first pass loads the adapters and is not measured.
    run(Work(prompts=work.prompts, num_output=2, folders=work.folders))
    seconds = []
    texts: list[str] = []
    for _ in range(repeats):
        start = time.perf_counter()
        texts = run(work)
        seconds.append(time.perf_counter() - start)
    speed = work.num_tokens / statistics.median(seconds)
    print(f"  {system:8s} {len(work.folders):3d} adapters  {speed:8.1f} tok/s", flush=True)
    return Timing(speed, texts)


def summarize(
    works: list[Work], offline: list[Timing], served: list[Timing]
) -> list[dict[str, object]]:
    return [
        {
            "adapters": len(work.folders),
            "offline tokens/s": round(ours.tokens_per_s, 1),
            "HTTP tokens/s": round(theirs.tokens_per_s, 1),
            "HTTP / offline": round(theirs.tokens_per_s / ours.tokens_per_s, 3),
            "same texts": f"{same_share(ours.texts, theirs.texts):.0%}",
        }
        for work, ours, theirs in zip(works, offline, served, strict=True)
    ]


def same_share(ours: list[str], theirs: list[str]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


if __name__ == "__main__":
    main()
