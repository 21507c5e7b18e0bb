"""Serve an S-LoRA trace over thousands of adapters on disk: hit rates, latency and memory.

    python -m benchmarks.studies.tier_trace --adapters 2000 --minutes 5

Adapters are generated once under --folder (SmolLM2's shapes, ranks 8 to 64, q and v projections)
and kept for the next run. The lengths of the trace are divided by --length-divisor, because a small
CPU generates about 80 tokens per second. Memory is the resident set of this process, sampled ten
times per second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import make_adapter
from benchmarks.lib.report import Table, parse_arguments, write_table
from benchmarks.lib.workloads import SLORA_RANKS, Arrival, slora, until
from loramux import LLM, SamplingParams
from loramux.engine.stats import tier_stats
from loramux.types.request import Request

MIB = 2**20
# q and v of SmolLM2 in float32: 57,600 elements per rank.
MEAN_BYTES = 57_600 * 4 * sum(SLORA_RANKS) // len(SLORA_RANKS)
KV_BYTES = 512 * MIB


class MemoryMeter:
    """Samples the largest resident set since start() in a thread."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


def make_adapters(folder: Path, llm: LLM, count: int) -> list[Path]:
    folders = []
    for number in range(count):
        path = folder / f"{number:05d}"
        if not (path / "adapter_model.safetensors").exists():
            rank = SLORA_RANKS[number % len(SLORA_RANKS)]
            make_adapter(
                path,
                llm.engine.catalog.base,
                rank=rank,
                seed=number,
                projections=("q_proj", "v_proj"),
                dtype=torch.bfloat16,
            )
        folders.append(path)
        if number % 200 == 199:
            print(f"{number + 1} adapters", flush=True)
    return folders


def register(llm: LLM, folders: list[Path]) -> list[str]:
    began = time.perf_counter()
    cids = [llm.register_adapter(folder) for folder in folders]
    seconds = time.perf_counter() - began
    print(f"registered {len(cids)} in {seconds:.0f} s ({1000 * seconds / len(cids):.0f} ms each)")
    return cids


def replay(
    llm: LLM, cids: list[str], trace: list[Arrival], length_divisor: int
) -> dict[str, list[float]]:
    """Add requests at the times of the trace; return their latencies in seconds."""
    engine = llm.engine
    source = random.Random(0)
    began = time.perf_counter()
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    times: dict[str, list[float]] = {"ttft": [], "gap": [], "error": [], "done": []}
    pending = list(reversed(trace))
    while pending or engine.has_work:
        now = time.perf_counter() - began
        while pending and pending[-1].time_s <= now:
            arrival = pending.pop()
            name = str(len(arrived))
            arrived[name] = arrival.time_s
            engine.add(_request(name, arrival, cids, source, length_divisor))
        if not engine.has_work:
            time.sleep(max(0.0, pending[-1].time_s - now))
            continue
        for event in engine.step():
            now = time.perf_counter() - began
            if event.error is not None:
                times["error"].append(now)
            elif event.request_id not in last:
                times["ttft"].append(now - arrived[event.request_id])
            else:
                times["gap"].append(now - last[event.request_id])
            last[event.request_id] = now
            if event.finish_reason is not None:
                times["done"].append(now)
    return times


def _request(
    name: str, arrival: Arrival, cids: list[str], source: random.Random, length_divisor: int
) -> Request:
    num_prompt = max(1, arrival.prompt_tokens // length_divisor)
    params = SamplingParams(
        temperature=0, max_tokens=max(1, arrival.output_tokens // length_divisor), ignore_eos=True
    )
    prompt = tuple(source.randrange(10, 40_000) for _ in range(num_prompt))
    selection = ((cids[arrival.adapter], 1.0),) if cids else ()
    return Request(request_id=name, prompt_token_ids=prompt, params=params, selection=selection)


def make_llm(args: argparse.Namespace, folder: Path) -> LLM:
    return LLM(
        device="cpu",
        device_memory_bytes=args.pool * MEAN_BYTES + KV_BYTES,
        host_memory_bytes=args.host * MEAN_BYTES,
        disk_space_bytes=args.disk * MEAN_BYTES,
        disk_folder=str(folder / "images"),
        max_active_adapters=args.pool,
        max_sequences=64,
    )


def memory_budget(llm: LLM, num_pool: int) -> int:
    """Sum up the memory of base requests with the whole pool in use, of the host tier, of the CPU
    kernels' copies of running adapters, and of the files that two loader threads convert."""
    memory = llm.engine.memory
    memory.rank.clear(list(range(memory.rank.num_pages)))
    base = [Arrival(0.0, 0, 0, 512, 64) for _ in range(64)]
    replay(llm, [], base, length_divisor=16)
    resting = psutil.Process().memory_info().rss - memory.tiers.host.used_bytes
    stacks = num_pool * (MEAN_BYTES + memory.rank.page_bytes) * 5 // 4
    reading = 2 * 3 * MEAN_BYTES * max(SLORA_RANKS) // (sum(SLORA_RANKS) // len(SLORA_RANKS))
    return resting + memory.tiers.host.budget_bytes + stacks + reading


def make_table(llm: LLM, trace: list[Arrival], times: dict[str, list[float]], memory: str) -> Table:
    table: Table = [
        {"what": "requests / done / errors", "value": _counts(trace, times)},
        {"what": "distinct adapters requested", "value": len({a.adapter for a in trace})},
        {"what": "first token P50 / P99, s", "value": _percentiles(times["ttft"])},
        {"what": "inter-token P50 / P99, s", "value": _percentiles(times["gap"])},
        {"what": "first token within 6 s", "value": _share(times["ttft"], 6.0)},
        {"what": "last answer, s", "value": f"{max(times['done']):.0f}"},
        {"what": "peak memory / budget, MiB", "value": memory},
    ]
    for tier in tier_stats(llm.engine):
        hit_rate = tier.hits / max(1, tier.hits + tier.misses)
        table.append(
            {
                "what": f"{tier.tier}: hit rate, loads, evictions, used / budget MiB",
                "value": f"{hit_rate:.3f}, {tier.loads}, {tier.evictions}, "
                f"{tier.used_bytes // MIB} / {tier.budget_bytes // MIB}",
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--length-divisor", type=int, default=16)
    parser.add_argument("--pool", type=int, default=32, help="adapters that fit into the pool")
    parser.add_argument(
        "--host", type=int, default=200, help="adapters that fit into the host tier"
    )
    parser.add_argument(
        "--disk", type=int, default=1000, help="adapters that fit into the disk tier"
    )
    parser.add_argument("--folder", type=Path)
    args = parse_arguments(parser)
    folder = args.folder or Path(tempfile.gettempdir()) / "loramux-tier-trace"
    llm = make_llm(args, folder)
    cids = register(llm, make_adapters(folder / "adapters", llm, args.adapters))
    budget = memory_budget(llm, args.pool)
    arrivals = slora(num_adapters=args.adapters, alpha=args.alpha, requests_per_s=args.rate)
    trace = until(arrivals, 60 * args.minutes)
    meter = MemoryMeter()
    meter.start()
    times = replay(llm, cids, trace, args.length_divisor)
    meter.stop()
    llm.engine.check_integrity()
    table = make_table(llm, trace, times, f"{meter.peak_bytes // MIB} / {budget // MIB}")
    machine = describe_machine(str(llm.engine.executor.dtype))
    write_table("tier-trace", table, machine, args)
    llm.engine.close()
    assert not times["error"], "a request failed"
    assert meter.peak_bytes <= budget, "memory went over its budget"


def _counts(trace: list[Arrival], times: dict[str, list[float]]) -> str:
    return f"{len(trace)} / {len(times['done'])} / {len(times['error'])}"


def _percentiles(values: list[float]) -> str:
    cuts = statistics.quantiles(values, n=100)
    return f"{cuts[49]:.3f} / {cuts[98]:.3f}"


def _share(values: list[float], limit: float) -> str:
    return f"{sum(value <= limit for value in values) / len(values):.3f}"


if __name__ == "__main__":
    main()
