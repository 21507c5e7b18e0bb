"""Measure the waits of one tenant's cold adapters while another tenant floods a hot adapter.

    python -m benchmarks.studies.fairness --seconds 60

The first tenant sends ten times the capacity, the second requests one cold adapter per second. The
table has the second tenant's time to the first token under fair and first-come-first-served
scheduling. The bound is max_wait_s, the load, and three times the longest step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import make_adapter
from benchmarks.lib.report import Table, parse_arguments, write_table
from loramux import LLM, SamplingParams
from loramux.types.request import Request

MIB = 2**20


def request(name: str, tenant: str, cid: str, max_tokens: int) -> Request:
    return Request(
        request_id=name,
        # Different prompts, so that the prefix cache has no hits.
        prompt_token_ids=tuple(100 + (hash((name, i)) % 30_000) for i in range(16)),
        params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        selection=((cid, 1.0),),
        tenant=tenant,
    )


def capacity(llm: LLM, cid: str, max_tokens: int) -> float:
    """Measure the requests per second that the machine can serve on the hot adapter."""
    began = time.perf_counter()
    for number in range(16):
        llm.engine.add(request(f"c{number}", "flood", cid, max_tokens))
    while llm.engine.has_work:
        llm.engine.step()
    return 16 / (time.perf_counter() - began)


def run(llm: LLM, cids: list[str], args: argparse.Namespace) -> tuple[list[float], float, float]:
    """Return the second tenant's waits, the longest step, and the rate of the flood."""
    engine = llm.engine
    rate = 10 * capacity(llm, cids[0], args.tokens)
    began = time.perf_counter()
    num_flood = num_cold = 0
    arrived: dict[str, float] = {}
    waits: dict[str, float] = {}
    longest_step = 0.0
    while (now := time.perf_counter() - began) < args.seconds:
        while num_flood < rate * now:
            engine.add(request(f"f{num_flood}", "flood", cids[0], args.tokens))
            num_flood += 1
        while num_cold < int(now) and num_cold + 1 < len(cids):
            name = f"q{num_cold}"
            engine.add(request(name, "quiet", cids[1 + num_cold], args.tokens))
            arrived[name] = now
            num_cold += 1
        step_began = time.perf_counter()
        for event in engine.step():
            if event.request_id in arrived and event.request_id not in waits:
                waits[event.request_id] = time.perf_counter() - began - arrived[event.request_id]
        longest_step = max(longest_step, time.perf_counter() - step_began)
    ended = time.perf_counter() - began
    # Requests without a first token have waited at least until now.
    return [waits.get(name, ended - since) for name, since in arrived.items()], longest_step, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--max-wait-s", type=float, default=2.0)
    args = parse_arguments(parser)
    table: Table = []
    for schedule in ("fair", "fcfs"):
        with tempfile.TemporaryDirectory() as folder:
            llm = LLM(
                schedule=schedule,
                max_wait_s=args.max_wait_s,
                max_sequences=16,
                device_memory_bytes=512 * MIB,
                disk_folder=str(Path(folder) / "images"),
            )
            base = llm.engine.catalog.base
            cids = []
            for number in range(int(args.seconds) + 1):
                path = make_adapter(Path(folder) / str(number), base, rank=16, seed=number)
                cids.append(llm.register_adapter(path))
            waits, longest_step, rate = run(llm, cids, args)
            machine = describe_machine(str(llm.engine.executor.dtype))
            llm.engine.close()
        table.append(
            {
                "schedule": schedule,
                "flood requests/s": f"{rate:.1f}",
                "cold requests": len(waits),
                "wait P50 s": f"{statistics.median(waits):.2f}",
                "longest wait s": f"{max(waits):.2f}",
                "bound s": f"{args.max_wait_s + 3 * longest_step:.2f} + load",
            }
        )
        print(table[-1], flush=True)
    write_table("fairness", table, machine, args)


if __name__ == "__main__":
    main()
