"""Check the SGMV LoRA kernels against their reference and time them beside other servers' kernels.

One decode step of rank 16 with the shapes of Llama-3.1-8B, in microseconds per decoder layer, in a
CUDA graph over several layers with separate weights. The peers' folder is not part of this
repository: it holds their packages and a file lora_peers.py with `PROVIDERS`, which maps a name to
a factory (site names, rank, number of adapters, adapter of each token, layers) of a callable
(layer, site name, x, y), and `assignment(popularity, tokens)`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.lora_cases import CASES, RANK, Case
from benchmarks.lib.timing import capture
from loramux.adapters.packed.paged import plan_rank_blocks, tabulate, uses_fp12
from loramux.kernels.gpu.lora import segmented as kernels
from loramux.kernels.gpu.lora.tables import (
    SMALL_ROWS,
    LaunchShape,
    LoraTables,
    decode_launch,
    make_tables,
)
from loramux.kernels.gpu.lora.work_list import (
    RankBlockDirectory,
    RowTiles,
    SiteShape,
    WorkLimits,
    build_work_list,
    gather_tiles,
    plain_tiles,
)
from loramux.kernels.gpu.pdl import supports_pdl
from loramux.kernels.reference import lora_segmented as reference

Selection = tuple[tuple[int, float], ...]

NUM_SUMMED = 256
"""Adapters of the steps with sums."""
NUM_LAYERS = 12
"""Enough layers to make the launch of a graph negligible."""
HIDDEN, KEYS, INNER = 4096, 1024, 14336
PAGE_ELEMENTS = 1 << 20
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class BenchSite:
    """A fused linear as the planner of adapter layouts expects it."""

    name: str
    in_features: int
    projections: tuple[str, ...]
    out_features: tuple[int, ...]

    @property
    def shape(self) -> SiteShape:
        return SiteShape(self.name, self.in_features, self.out_features)


SITES = (
    BenchSite("qkv", HIDDEN, ("q_proj", "k_proj", "v_proj"), (HIDDEN, KEYS, KEYS)),
    BenchSite("o", HIDDEN, ("o_proj",), (HIDDEN,)),
    BenchSite("gate_up", HIDDEN, ("gate_proj", "up_proj"), (INNER, INNER)),
    BenchSite("down", INNER, ("down_proj",), (HIDDEN,)),
)
PROJECTIONS = tuple(name for site in SITES for name in site.projections)
SITE_INDICES = {"qkvo": (0, 1), "all": (0, 1, 2, 3)}


class World:
    """Random adapters in pool pages, and the tables of a step."""

    def __init__(
        self,
        ranks: Sequence[int],
        projections: Sequence[str],
        *,
        num_layers: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.is_fp12 = uses_fp12([site.in_features for site in SITES], dtype, PAGE_ELEMENTS)
        layouts = {
            rank: plan_rank_blocks(
                SITES,  # type: ignore[arg-type]
                {(layer, name): rank for layer in range(num_layers) for name in projections},
                PAGE_ELEMENTS,
                is_fp12=self.is_fp12,
            )
            for rank in set(ranks)
        }
        num_pages = sum(layouts[rank].num_pages for rank in ranks)
        self.num_layers = num_layers
        self.pool = torch.empty(num_pages, PAGE_ELEMENTS, dtype=dtype, device=DEVICE)
        self.pool.normal_(std=0.02)
        pages = np.random.default_rng(0).permutation(num_pages)
        tables = {
            rank: tabulate(layout, projections=PROJECTIONS, num_layers=num_layers)
            for rank, layout in layouts.items()
        }
        max_blocks = sum(tables[rank].offsets.shape[1] for rank in ranks)
        self.index = RankBlockDirectory(max_slots=len(ranks), max_blocks=max_blocks)
        directory = np.zeros((num_layers, max_blocks, 4), dtype=np.int32)
        taken = 0
        for rank in ranks:
            table = tables[rank]
            _, start = self.index.add(table.blocks_per_projection)
            mine = pages[taken : taken + layouts[rank].num_pages]
            taken += layouts[rank].num_pages
            directory[:, start : start + table.offsets.shape[1]] = table.addresses(mine.tolist())
        self.directory = torch.from_numpy(directory).to(DEVICE)
        self.slots = torch.from_numpy(self.index.slots).to(DEVICE)

    def tables(self, tiles: RowTiles, launch: LaunchShape, limits: WorkLimits) -> LoraTables:
        """Make the tables of a step and fill in its work list."""
        tables = make_tables(
            [site.shape for site in SITES],
            num_layers=self.num_layers,
            limits=limits,
            launch=replace(launch, is_fp12=self.is_fp12),
            device=DEVICE,
            num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
        )
        host = np.zeros(limits.num_words, dtype=np.int32)
        used = build_work_list(tiles, self.index, limits, host)
        tables.work[:used].copy_(torch.from_numpy(host[:used]))
        kernels.resolve(tables, self.directory, self.slots)
        return tables

    def limits(self, *, max_items: int, max_h_rows: int) -> WorkLimits:
        """Return the limits of a step, with small tiles where the server uses them."""
        small_rows = SMALL_ROWS if self.is_fp12 else 0
        return WorkLimits(max_items=max_items, max_h_rows=max_h_rows, small_rows=small_rows)

    def decode_tables(self, ids: Tensor, launch: LaunchShape) -> LoraTables:
        limits = self.limits(max_items=1024, max_h_rows=4096)
        slots = ids.numpy().astype(np.int32)
        tiles = plain_tiles(slots, limits.tile_rows)
        return self.tables(tiles, launch, limits)


class Layer:
    """The GEMMs of the base's decoder layers, with their inputs and outputs."""

    def __init__(self, num_tokens: int, num_layers: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * 0.02

        self.weights = [
            [random(sum(site.out_features), site.in_features) for site in SITES]
            for _ in range(num_layers)
        ]
        self.x = [random(num_tokens, site.in_features) for site in SITES]
        self.y = [random(num_tokens, sum(site.out_features)) for site in SITES]

    def base(self, layer: int, site: int) -> None:
        torch.mm(self.x[site], self.weights[layer][site].t(), out=self.y[site])


def time_graph(run: Callable[[], object], *, num_replays: int = 20) -> float:
    """Return the median microseconds of a replay."""
    graph = capture(run)
    times = []
    for index in range(num_replays + 3):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if index >= 3:
            times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def add_lora(tables: LoraTables, world: World, layer: Layer, at: int, site: int) -> None:
    kernels.shrink(tables, world.pool, layer.x[site], at, site)
    kernels.expand(tables, world.pool, layer.y[site], at, site)


def relative_error(world: World, tables: LoraTables, num_tokens: int, site: int) -> float:
    """Compare what the last layer's adapters add with the reference."""
    shape, at, dtype = SITES[site], world.num_layers - 1, world.pool.dtype
    x = torch.randn(num_tokens, shape.in_features, device=DEVICE).to(dtype)
    y = (torch.randn(num_tokens, sum(shape.out_features), device=DEVICE) / 10).to(dtype)
    before, expected = y.clone(), y.clone()
    tables.partials.fill_(float("nan"))
    kernels.shrink(tables, world.pool, x, at, site)
    kernels.expand(tables, world.pool, y, at, site)
    reference.shrink(tables, world.pool, x, at, site)
    reference.expand(tables, world.pool, expected, at, site)
    change = (expected.float() - before.float()).norm()
    return ((y.float() - expected.float()).norm() / change).item()


MIXES: dict[str, list[tuple[Selection, int]]] = {
    "distinct": [(((slot, 1.0),), 1) for slot in range(4)],
    "identical": [(((0, 1.0),), 20)],
    "skewed, base tokens": [(((0, 1.0),), 18), ((), 2), (((1, 1.0),), 3), (((2, 1.0),), 1)],
    "composed": [(((0, 0.5), (1, -1.5)), 3), (((2, 1.0), (0, 2.0)), 1), (((3, 1.0),), 1)],
}
"""Mix: selections of (slot, weight) with the number of tokens of each."""


def check(launches: Sequence[LaunchShape]) -> list[dict[str, Any]]:
    """Compare every dtype, rank, mix and launch with the reference."""
    rows = []
    for dtype, most in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)):
        for ranks in ((1, 3, 8, 16), (16, 16, 16, 16), (64, 16, 200, 1)):
            world = World(ranks, PROJECTIONS[:4], num_layers=1, dtype=dtype)
            for name, mix in MIXES.items():
                tiles = gather_tiles([pairs for pairs, _ in mix], [n for _, n in mix], 16)
                for launch in launches:
                    limits = world.limits(max_items=256, max_h_rows=512)
                    tables = world.tables(tiles, launch, limits)
                    error = relative_error(world, tables, sum(n for _, n in mix), site=0)
                    rows.append({"dtype": str(dtype), "ranks": ranks, "mix": name, "error": error})
                    assert error < most, rows[-1]
    return rows


AddLora = Callable[[int, int], None]
"""Add the adapters' output at (layer, site) to that layer's y."""


def time_lora(case: Case, layer: Layer, add: AddLora) -> tuple[float, float]:
    """Return the microseconds per layer of LoRA alone, and of the base with LoRA."""
    num_layers = len(layer.weights)
    positions = [(at, site) for at in range(num_layers) for site in range(len(SITES))]

    def lora() -> None:
        for at, site in positions:
            if site in SITE_INDICES[case.sites]:
                add(at, site)

    def both() -> None:
        for at, site in positions:
            layer.base(at, site)
            if site in SITE_INDICES[case.sites]:
                add(at, site)

    return time_graph(lora) / num_layers, time_graph(both) / num_layers


def time_base(layer: Layer) -> float:
    num_layers = len(layer.weights)

    def base() -> None:
        for at in range(num_layers):
            for site in range(len(SITES)):
                layer.base(at, site)

    return time_graph(base) / num_layers


def time_case(case: Case, world: World, launch: LaunchShape, layer: Layer) -> dict[str, float]:
    """Return the microseconds per layer of the base, of LoRA alone, and added by LoRA."""
    return time_tables(case, world, world.decode_tables(case.adapters(), launch), layer)


def time_tables(case: Case, world: World, tables: LoraTables, layer: Layer) -> dict[str, float]:
    def add(at: int, site: int) -> None:
        add_lora(tables, world, layer, at, site)

    base_us = time_base(layer)
    alone_us, both_us = time_lora(case, layer, add)
    return {"base": base_us, "alone": alone_us, "added": both_us - base_us}


def time_peer(case: Case, peers: Any, name: str, layer: Layer, base_us: float) -> dict[str, Any]:
    ids = peers.assignment(case.popularity, case.num_tokens)
    names = [SITES[site].name for site in SITE_INDICES[case.sites]]
    try:
        peer = peers.PROVIDERS[name](names, RANK, int(ids.max()) + 1, ids, len(layer.weights))

        def add(at: int, site: int) -> None:
            peer(at, SITES[site].name, layer.x[site], layer.y[site])

        alone_us, both_us = time_lora(case, layer, add)
        return {name: alone_us, f"{name} added": both_us - base_us}
    except Exception as error:  # A peer that fails leaves its message in the table.
        return {name: f"{type(error).__name__}: {error}"[:60]}


def floor_us(case: Case, read_tbps: float) -> float:
    sites = [SITES[site] for site in SITE_INDICES[case.sites]]
    per_adapter = RANK * sum(
        s.in_features * len(s.out_features) + sum(s.out_features) for s in sites
    )
    return case.num_adapters * per_adapter * 2 / (read_tbps * 1e6)


def measure_read_tbps() -> float:
    big = torch.randn(65536, 16384, device=DEVICE, dtype=torch.bfloat16)
    one = torch.randn(1, 16384, device=DEVICE, dtype=torch.bfloat16)
    return big.numel() * 2 / time_graph(lambda: torch.mm(one, big.t())) / 1e6


def device_launch() -> LaunchShape:
    return decode_launch(use_pdl=supports_pdl(DEVICE.type))


def checked_launches() -> list[LaunchShape]:
    """Return the server's launch, and one with split-K for single tokens."""
    launch = device_launch()
    return [launch, replace(launch, row_k=1024)]


def run_cases(peers: Any) -> list[dict[str, Any]]:
    world = World([RANK] * 256, PROJECTIONS, num_layers=NUM_LAYERS)
    read_tbps = measure_read_tbps()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        layer = Layer(case.num_tokens, NUM_LAYERS)
        row: dict[str, Any] = {
            "tokens": case.num_tokens,
            "sites": case.sites,
            "adapters": case.num_adapters,
            "floor": floor_us(case, read_tbps),
            "goal": case.goal_us,
            **time_case(case, world, device_launch(), layer),
        }
        for name in peers.PROVIDERS if peers else ():
            row |= time_peer(case, peers, name, layer, row["base"])
            torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def run_sums() -> list[dict[str, Any]]:
    """Time decode steps in which every token has its own sum of 1 or 3 adapters."""
    world = World([RANK] * NUM_SUMMED, PROJECTIONS, num_layers=NUM_LAYERS)
    limits = world.limits(max_items=1024, max_h_rows=4096)
    rows: list[dict[str, Any]] = []
    for num_tokens, num_parts in itertools.product((1, 32, 256), (1, 3)):
        case = Case(num_tokens, "all", "distinct", 0)
        selections = [
            tuple(((token * num_parts + part) % NUM_SUMMED, 0.5) for part in range(num_parts))
            for token in range(num_tokens)
        ]
        tiles = gather_tiles(selections, [1] * num_tokens, limits.tile_rows)
        tables = world.tables(tiles, device_launch(), limits)
        row = {"tokens": num_tokens, "sites": "all", "adapters": num_parts}
        row |= time_tables(case, world, tables, Layer(num_tokens, NUM_LAYERS))
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def import_peers(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    sys.path.append(str(folder / "site312"))
    return importlib.import_module("lora_peers")
