"""Adapters in the tail of the base weights on a GPU: checked against lists, timed beside them.

    python3 -m benchmarks.gpu_tail [--batches 1,8,32,64,128,256] [--sites all,qkvo] [--variants ...]

Whole decode graphs of a Llama-3.1-8B-shaped model at 512 tokens of context: without LoRA, with work
lists (a shrink and an expand at every site; for "qkvo" at those of attention too), and with every
variant of the tail. Random weights, rank 16, eight adapters, one in a batch of one; adapters are
random numbers in pool pages, without files. Logits are compared with those of the lists. Needs an
NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_engine_check import NAMES
from benchmarks.gpu_timing import print_table, time_by_kernel
from benchmarks.random_model import SHAPES, random_model
from loramux.adapters.packed.dense import ATTENTION_SITES, sites_of
from loramux.adapters.packed.fp12 import uses_fp12
from loramux.adapters.packed.paged import plan_rank_blocks
from loramux.engine.build_device import DevicePlan
from loramux.kernels.gpu.lora_augmented.tables import AugmentedLaunch, augmented_launch
from loramux.lora.graph_lora import BASE_MODE, LoraMode, LoraPath
from loramux.memory.pool import KVGeometry, PagePool
from loramux.memory.records import ResidentAdapter
from loramux.models.architectures import base_info
from loramux.models.augmented_linear import augment_linears
from loramux.models.loader import LoadedModel
from loramux.runner.gpu_runner import BatchLimits, GpuRunner
from loramux.types.request import Selection
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, SampleRow, StepPlan

RANK, NUM_ADAPTERS, CONTEXT, BLOCK = 16, 8, 512, 16
PROJECTIONS = {"all": NAMES, "qkvo": NAMES[:4]}
DEVICE = torch.device("cuda")

ROWS = AugmentedLaunch(tile_rows=1)
TILES = AugmentedLaunch(tile_rows=16, fuses_norm=False)
VARIANTS: dict[str, AugmentedLaunch] = {
    "rows": ROWS,
    "tiles": TILES,
    "tiles, norms too": replace(TILES, fuses_norm=True),
    # To be named: for tuning.
    "rows256": replace(ROWS, activate_n=256, activate_warps=1),
    "rows1024": replace(ROWS, activate_n=1024, activate_warps=4),
    "rows8": replace(ROWS, norm_warps=8),
    "tiles of 32": replace(TILES, tile_rows=32),
    "tiles of 64": replace(TILES, tile_rows=64),
}
USUAL = ("rows", "tiles", "tiles, norms too")
# Beyond, every row would read its adapter's B for itself.
MOST_ROWS = 64
SEGMENTED = LoraMode(LoraPath.SEGMENTED)
SEGMENTED_ATTENTION = LoraMode(LoraPath.SEGMENTED, sites=ATTENTION_SITES)
AUGMENTED = LoraMode(LoraPath.AUGMENTED)
AUGMENTED_ATTENTION = LoraMode(LoraPath.AUGMENTED, sites=ATTENTION_SITES)


class World:
    """A runner over random weights, with eight adapters of each kind in pages of its pool."""

    def __init__(self, max_batch: int, tail_ranks: int) -> None:
        model = random_model(SHAPES["llama-3.1-8b"], torch.bfloat16, std=0.02)
        augment_linears(model.decoder, tail_ranks // 16)
        self.num_layers = model.config.num_layers
        self.pages_per_sequence = -(-(CONTEXT + 1) // BLOCK)
        plan = make_plan(model, max_batch, self.pages_per_sequence)
        sequence_pages = max_batch * self.pages_per_sequence
        page_elements = plan.geometry.page_elements
        layouts = {
            name: plan_rank_blocks(
                plan.sites,
                {(layer, p): RANK for layer in range(self.num_layers) for p in projections},
                page_elements,
                is_fp12=uses_fp12(
                    (s.in_features for s in plan.sites), torch.bfloat16, page_elements
                ),
            )
            for name, projections in PROJECTIONS.items()
        }
        num_pages = sum(layout.num_pages for layout in layouts.values()) * NUM_ADAPTERS
        self.pool: PagePool = plan.make_pool(sequence_pages + num_pages, DEVICE)
        for page in self.pool.storage.split(256):
            page.normal_(std=0.02)
        self.runner: GpuRunner = plan.make_runner(self.pool)
        self.cids: dict[str, list[str]] = {}
        first = sequence_pages
        for name, layout in layouts.items():
            self.cids[name] = [f"{name}{i}" for i in range(NUM_ADAPTERS)]
            for cid in self.cids[name]:
                page_ids = list(range(first, first + layout.num_pages))
                first += layout.num_pages
                self.runner.directory.add(ResidentAdapter(cid, layout, page_ids))

    @property
    def graphs(self) -> Any:
        return self.runner._graphs

    def step(self, batch: int, selections: Sequence[Selection]) -> StepPlan:
        row = SampleRow(SamplingParams(temperature=0.0), 0, (), ())
        per, chunks = self.pages_per_sequence, []
        for i in range(batch):
            pages = range(i * per, (i + 1) * per)
            selection = selections[i % len(selections)]
            chunks.append(Chunk(i, (1000 + i,), CONTEXT - 1, pages, selection, sample=row))
        return StepPlan(tuple(chunks))


def make_plan(model: LoadedModel, max_batch: int, max_pages: int) -> DevicePlan:
    config = model.config
    geometry = KVGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=BLOCK,
    )
    limits = BatchLimits(max_batch_tokens=max_batch, max_sequences=max_batch, max_pages=max_pages)
    return DevicePlan(model, sites_of(base_info(config, model.name)), geometry, limits)


def run_kind(world: World, step: StepPlan, kind: LoraMode) -> tuple[Tensor, Tensor, float]:
    """The logits and tokens of a step of one kind of graph, in the step's order; its seconds."""
    graphs, batch = world.graphs, len(step.chunks)
    size = next(size for size in graphs._sizes if size >= batch)
    tail = graphs.lora.augmented
    graphs._steps.made.pop((size, kind), None)
    graphs.lora.augmented = tail if kind.path is LoraPath.AUGMENTED else None
    try:
        # Twice: an adapter is brought to the tail when it is asked for again.
        for _ in range(2):
            result = world.runner.run(step)
    finally:
        graphs.lora.augmented = tail
    assert (size, kind) in graphs._steps.made, "another kind of graph has run"
    tokens = torch.tensor([result.token_ids[i][0] for i in range(batch)])
    # Rows stand in the order of the adapters' slots, in every kind the same.
    return graphs._logits[:batch].float(), tokens, replay_s(graphs._step(size, kind))


def replay_s(replay: Any, *, num_replays: int = 20, num_rounds: int = 3) -> float:
    rounds = []
    for _ in range(num_rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(num_replays):
            replay()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(stop) / 1e3 / num_replays)
    return min(rounds)


def measure(world: World, batch: int, sites: str, names: Sequence[str]) -> list[dict[str, Any]]:
    cids = world.cids[sites][: 1 if batch == 1 else NUM_ADAPTERS]
    step = world.step(batch, [((cid, 1.0),) for cid in cids])
    base, _, base_s = run_kind(world, world.step(batch, [()]), BASE_MODE)
    base = base.clone()
    kind = SEGMENTED if sites == "all" else SEGMENTED_ATTENTION
    lists, list_tokens, lists_s = run_kind(world, step, kind)
    lists = lists.clone()
    whole = {"sites": sites, "batch": batch, "adapters": len(cids)}
    rows = [
        whole | {"kind": "base", "ms": base_s * 1e3},
        whole | figures(world, "lists", base_s, lists_s),
    ]
    if batch <= len(cids):
        # In larger batches the rows of an adapter stand together, and base rows as they came.
        rows[-1]["changed"] = float((lists - base).norm() / lists.norm())
    if kind == SEGMENTED_ATTENTION:
        rows.append(whole | launched_everywhere(world, batch, base_s, lists))
    for name in names:
        if VARIANTS[name].tile_rows == 1 and batch > MOST_ROWS:
            continue
        world.graphs.lora.augmented.launch_of = lambda _, name=name: VARIANTS[name]
        tail_kind = AUGMENTED if sites == "all" else AUGMENTED_ATTENTION
        logits, tokens, seconds = run_kind(world, step, tail_kind)
        rows.append(
            whole
            | figures(world, name, base_s, seconds)
            | {
                "error": float((logits - lists).norm() / lists.norm()),
                "other tokens": int((tokens != list_tokens).sum()),
            }
        )
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def launched_everywhere(world: World, batch: int, base_s: float, lists: Tensor) -> dict[str, Any]:
    """The graph for adapters of all sites, over the list of the step before."""
    graphs = world.graphs
    size = next(size for size in graphs._sizes if size >= batch)
    seconds = replay_s(graphs._step(size, SEGMENTED))
    error = float((graphs._logits[:batch].float() - lists).norm() / lists.norm())
    return figures(world, "lists, all launches", base_s, seconds) | {"error": error}


def figures(world: World, kind: str, base_s: float, seconds: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "ms": seconds * 1e3,
        "us a layer": (seconds - base_s) / world.num_layers * 1e6,
        "of base": base_s / seconds,
    }


def show_kernels(world: World, batch: int, name: str) -> None:
    print(f"\nbatch {batch}, {name}: kernels of one step")
    world.graphs.lora.augmented.launch_of = lambda _: VARIANTS[name]
    cids = world.cids["all"][: 1 if batch == 1 else NUM_ADAPTERS]
    run_kind(world, world.step(batch, [((cid, 1.0),) for cid in cids]), AUGMENTED)
    size = next(size for size in world.graphs._sizes if size >= batch)
    time_by_kernel(world.graphs._step(size, AUGMENTED))


def time_copies(world: World) -> None:
    """Of an adapter's A into the tail, with the work of the host."""
    tail = world.graphs.lora.augmented.cache
    slots = [world.runner.directory.slots_of(((cid, 1.0),))[0][0] for cid in world.cids["all"]]
    for slot in tail.held:
        tail.forget(slot)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(2):
        tail.place(slots)
    host_s = time.perf_counter() - began
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    print(
        f"A of {len(slots)} adapters copied in {seconds * 1e6:.0f} us together, "
        f"{host_s * 1e6:.0f} us of it on the host"
    )


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    header = ["sites", "batch", "adapters", "kind", "ms", "us a layer", "of base"]
    header += ["error", "changed", "other tokens"]
    formats = {"ms": ".3f", "us a layer": ".1f", "of base": ".3f", "error": ".1e", "changed": ".1e"}
    lines = [
        [format(row[name], formats.get(name, "")) if name in row else "" for name in header]
        for row in rows
    ]
    print_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--sites", default="all,qkvo")
    parser.add_argument("--variants", default="|".join(USUAL), help="names, separated by |")
    parser.add_argument("--tail-ranks", type=int, default=128)
    parser.add_argument("--kernels", default="", help="BATCH:VARIANT|...: the times of its kernels")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    batches = [int(part) for part in arguments.batches.split(",")]
    world = World(max(batches), arguments.tail_ranks)
    print(f"weights and adapters: {time.perf_counter() - began:.1f} s", flush=True)
    rows = []
    for sites in arguments.sites.split(","):
        for batch in batches:
            rows += measure(world, batch, sites, arguments.variants.split("|"))
            print(f"{time.perf_counter() - began:.0f} s", flush=True)
    for part in filter(None, arguments.kernels.split("|")):
        batch_text, name = part.split(":", 1)
        show_kernels(world, int(batch_text), name)
    time_copies(world)
    print_rows(rows)
    print({size: augmented_launch(size).tile_rows for size in batches}, "rows a tile when serving")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
