"""Measure tokens/s on the base, 1, 8 and 32 adapters, beside transformers and PEFT.

    python -m benchmarks.engine [--requests 32] [--input 64] [--output 64]

All systems run one after the other in one process on the same prompts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Before torch, which reads what this sets when it is loaded.
import loramux  # noqa: F401

# isort: split
import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.peers import Peers
from benchmarks.lib.random_weights import make_adapter
from benchmarks.lib.report import parse_arguments, write_table
from loramux import LLM, LoRARequest, SamplingParams


@dataclass(frozen=True)
class Work:
    prompts: list[list[int]]
    num_output: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) * self.num_output


@dataclass(frozen=True)
class Row:
    system: str
    adapters: int
    tokens_per_s: float
    seconds: float
    outputs: list[list[int]]


def make_work(num_requests: int, num_input: int, num_output: int, vocab_size: int) -> Work:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, vocab_size - 100, (num_requests, num_input), generator=generator)
    return Work(prompts=tokens.tolist(), num_output=num_output)


def measure(system: str, adapters: int, work: Work, run: Callable[[], list[list[int]]]) -> Row:
    start = time.perf_counter()
    outputs = run()
    seconds = time.perf_counter() - start
    row = Row(system, adapters, work.num_tokens / seconds, seconds, outputs)
    print(f"  {system:28s} {adapters:3d} adapters  {row.tokens_per_s:8.1f} tok/s", flush=True)
    return row


def run_engine(llm: LLM, work: Work, folders: list[Path]) -> list[list[int]]:
    """Run the work on the engine; request i uses adapter i modulo their number, or the base."""
    adapters = [LoRARequest(folder.name, i + 1, str(folder)) for i, folder in enumerate(folders)]
    requests = [adapters[i % len(adapters)] if adapters else None for i in range(len(work.prompts))]
    params = SamplingParams(temperature=0, max_tokens=work.num_output, ignore_eos=True)
    outputs = llm.generate(work.prompts, params, lora_request=requests, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def engine_rows(llm: LLM, work: Work, folders: list[Path], counts: list[int]) -> list[Row]:
    warm_up = Work(work.prompts, 2)
    rows = []
    for count in counts:
        # The first pass loads the adapters and is not measured.
        run_engine(llm, warm_up, folders[:count])
        rows.append(
            measure(
                "loramux",
                count,
                work,
                partial(run_engine, llm, work, folders[:count]),
            )
        )
    return rows


def peer_rows(peers: Peers, work: Work, folders: list[Path], counts: list[int]) -> list[Row]:
    rows = [measure("transformers, static batch", 0, work, lambda: peers.base(work.prompts))]
    for count in counts:
        peers.load(folders[:count])
        rows.append(
            measure(
                "PEFT, one adapter at a time",
                count,
                work,
                partial(peers.sequential, work.prompts, folders[:count]),
            )
        )
    return rows


def gaps_of(
    peers: Peers, work: Work, folders: list[Path], rows: list[Row]
) -> dict[int, list[float]]:
    """By number of adapters: the logit gap of each answer that differs from the peer's."""
    ours = {row.adapters: row.outputs for row in rows if row.system == "loramux"}
    return {
        row.adapters: [
            peers.gap(work.prompts[i], own, theirs, folders[i % row.adapters])
            for i, (own, theirs) in enumerate(zip(ours[row.adapters], row.outputs, strict=True))
            if own != theirs
        ]
        for row in rows
        if row.system != "loramux" and row.adapters
    }


def agreement(rows: list[Row]) -> dict[int, float]:
    """By number of adapters: the share of requests with the same tokens as the peer."""
    peers = {row.adapters: row.outputs for row in rows if row.system != "loramux"}
    ours = {row.adapters: row.outputs for row in rows if row.system == "loramux"}
    return {
        count: sum(a == b for a, b in zip(ours[count], outputs, strict=True)) / len(outputs)
        for count, outputs in peers.items()
        if count in ours
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--no-peers", action="store_true")
    args = parse_arguments(parser)

    # Without the prefix cache, since the peers have none.
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_batch_tokens=256,
        device_memory_bytes=2 * 2**30,
        prefix_cache=False,
    )
    work = make_work(args.requests, args.input, args.output, llm.engine.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        base = llm.engine.catalog.base
        folders = [
            make_adapter(Path(folder) / f"adapter-{i}", base, rank=args.rank, seed=i)
            for i in range(max(args.adapters, default=0))
        ]
        gaps: dict[int, list[float]] = {}
        rows = engine_rows(llm, work, folders, [0, *args.adapters])
        if not args.no_peers:
            peers = Peers(llm, work.num_output)
            rows += peer_rows(peers, work, folders, [n for n in args.adapters if n > 1])
            gaps = gaps_of(peers, work, folders, rows)
    table = summarize(rows, gaps)
    machine = describe_machine(str(llm.engine.executor.dtype))
    write_table("engine-throughput", table, machine, args)


def summarize(rows: list[Row], gaps: dict[int, list[float]]) -> list[dict[str, object]]:
    base = next(row for row in rows if row.system == "loramux" and row.adapters == 0)
    same = agreement(rows)
    return [
        {
            "system": row.system,
            "adapters": row.adapters,
            "tokens/s": round(row.tokens_per_s, 1),
            "seconds": round(row.seconds, 2),
            "of our base": round(row.tokens_per_s / base.tokens_per_s, 3),
            "same greedy tokens as loramux": ""
            if row.system == "loramux"
            else f"{same[row.adapters]:.0%}",
            "logit gaps of differing tokens": ""
            if row.system == "loramux"
            else ", ".join(f"{gap:.1e}" for gap in gaps.get(row.adapters, [])),
        }
        for row in rows
    ]


if __name__ == "__main__":
    main()
