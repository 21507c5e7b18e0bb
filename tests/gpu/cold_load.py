"""Time adapters from their folder to the first token, phase by phase.

    python -m tests.gpu.cold_load [--count 8] [--rank 16] [--device cuda|cpu]

Each adapter is a new PEFT folder in bfloat16 on every linear layer, whose files are in the page
cache. It is registered by its header, identified (read, hashed, checked and packed) on a loader
thread as in the server, and used by a request for one token. The model has random weights: the
shapes of Llama-3.1-8B on a GPU, a small model on a CPU. Phases of the identification overlap; each
time is from its start.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_weights import add_engine_options, is_gpu, make_adapter, make_engine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from loramux.engine.engine import Engine
from loramux.engine.gc_control import FullCollections
from loramux.memory.loader import lower_priority
from loramux.types.request import Request, Selection
from loramux.types.sampling import SamplingParams

T = TypeVar("T")
PROMPT = tuple(range(1, 17))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cold_load", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=8, help="number of adapters")
    parser.add_argument("--rank", type=int, default=16)
    add_engine_options(parser)
    return parser


def one_token(engine: Engine, name: str, selection: Selection = ()) -> None:
    """Run a request until its only token."""
    engine.add(
        Request(
            request_id=name,
            prompt_token_ids=PROMPT,
            params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            selection=selection,
        )
    )
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error


class Stopwatch:
    """Times steps that follow each other, in milliseconds."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        self.ms[name] = 1000 * (time.perf_counter() - began)
        return result


def cold_load(engine: Engine, folder: Path, threads: ThreadPoolExecutor) -> dict[str, object]:
    """Return the milliseconds of each phase for one adapter."""
    watch = Stopwatch()
    watch.run("header", lambda: engine.catalog.inspect(folder))
    memory = engine.memory
    found = watch.run("identify", lambda: threads.submit(memory.identify, folder).result())
    assert found.loaded is not None, "the folder is not new"
    watch.run("admit", lambda: memory.admit(found))
    selection = ((found.card.cid, 1.0),)
    watch.run("copy and token", lambda: one_token(engine, folder.name, selection))
    watch.run("token again", lambda: one_token(engine, folder.name, selection))
    total = sum(watch.ms[name] for name in ("identify", "admit", "copy and token"))
    phases = {
        "inspect": found.loaded.times.inspect_s,
        "read": found.loaded.times.read_s,
        "hash": found.loaded.times.hash_s,
        "pack": found.loaded.times.pack_s,
    }
    return {
        "adapter": folder.name,
        "header ms": watch.ms["header"],
        **{f"{name} ms": 1000 * seconds for name, seconds in phases.items()},
        "identify ms": watch.ms["identify"],
        "copy ms": 1000 * engine.residency.records[found.card.cid].load_s,
        "token ms": watch.ms["token again"],
        "folder to first token ms": total,
    }


def measure(engine: Engine, root: Path, *, count: int, rank: int) -> Section:
    rows: Table = []
    base = engine.catalog.base
    num_bytes = 0
    for name in ("warm-up", *(f"adapter-{number}" for number in range(count))):
        folder = make_adapter(root / name, base, rank=rank, seed=len(rows), dtype=torch.bfloat16)
        num_bytes = (folder / "adapter_model.safetensors").stat().st_size
        with ThreadPoolExecutor(1, initializer=lower_priority) as threads:
            one_token(engine, "base")
            rows.append(cold_load(engine, folder, threads))
    return Section(
        title="Folder to first token",
        rows=rows,
        notes=(
            f"{count} adapters of rank {rank} on every linear layer, {num_bytes / 1e6:.0f} MB of "
            "bfloat16 in the page cache, after one that warms up. inspect, read, hash and pack "
            "are the ends of overlapping phases, from the start of the identification; identify "
            "also checks the values. copy: host memory to pages. token: a request on the loaded "
            "adapter.",
        ),
    )


def main() -> None:
    arguments = parse_arguments(make_parser())
    if arguments.model is None:
        arguments.model = "llama-3.1-8b" if is_gpu(arguments) else "small"
    out = start_report("cold-load", arguments, describe_machine(arguments.dtype, arguments.device))
    _, engine = make_engine(arguments)
    with tempfile.TemporaryDirectory() as root, FullCollections(owns_process=True):
        out.add(measure(engine, Path(root), count=arguments.count, rank=arguments.rank))
    engine.close()
    out.finish()


if __name__ == "__main__":
    main()
