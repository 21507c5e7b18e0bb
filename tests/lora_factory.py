"""Random adapters in the pages of a small pool, and what they should add to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loramux.adapters.packed.fp12 import pack_fp12
from loramux.adapters.packed.paged import RankBlockLayout, plan_rank_blocks, tabulate
from loramux.kernels.gpu.lora.tables import LaunchShape, LoraTables, make_tables
from loramux.kernels.gpu.lora.work_list import (
    RankBlockDirectory,
    SiteShape,
    WorkLimits,
    build_work_list,
    gather_tiles,
)
from loramux.kernels.reference import lora_segmented
from loramux.kernels.reference.fp12 import unpack_fp12
from loramux.lora.graph_lora import LoraMode, LoraPath
from loramux.types.model import ATTENTION_BLOCK, LinearSpec
from tests.linear_specs import ATTENTION_SITES

Selection = Sequence[tuple[int, float]]

NUM_LAYERS = 2
PAGE_ELEMENTS = 1536
SITES = (
    LinearSpec("qkv", 48, ("q_proj", "k_proj", "v_proj"), (80, 16, 16), ATTENTION_BLOCK),
    LinearSpec("o", 80, ("o_proj",), (48,), ATTENTION_BLOCK),
    LinearSpec("gate_up", 48, ("gate_proj", "up_proj"), (72, 72)),
)
# Sites that fp12 supports: columns in blocks of 128, and pages for 16 ranks.
FP12_SITES = (
    LinearSpec("qkv", 640, ("q_proj", "k_proj", "v_proj"), (80, 16, 16), ATTENTION_BLOCK),
    LinearSpec("o", 128, ("o_proj",), (48,), ATTENTION_BLOCK),
    LinearSpec("gate_up", 1152, ("gate_proj", "up_proj"), (72, 72)),
)
FP12_PAGE_ELEMENTS = 1 << 14
PROJECTIONS = tuple(name for site in SITES for name in site.projections)
LAUNCH = LaunchShape(
    row_k=64,
    row_values=64,
    tile_k=32,
    step_k=16,
    shrink_warps=1,
    expand_warps=1,
    shrinks_per_sm=3,
    expands_per_sm=3,
)
LIMITS = WorkLimits(max_items=128, max_h_rows=400)


@dataclass
class LoraWorld:
    """Adapters by slot, where they lie, and the tables of a step."""

    pool: Tensor
    directory: Tensor
    index: RankBlockDirectory
    tables: LoraTables
    sites: tuple[LinearSpec, ...]
    weights: list[dict[tuple[int, str], tuple[Tensor, Tensor]]]

    def plan(self, rows: Sequence[Selection]) -> None:
        """Return the step's work, in the tables; rows[i] is what row i selects."""
        limits = self.tables.limits
        host = np.zeros(limits.num_words, dtype=np.int32)
        tiles = gather_tiles(rows, [1] * len(rows), limits.tile_rows, keeps_base=True)
        used = build_work_list(tiles, self.index, limits, host)
        self.tables.work[:used].copy_(torch.from_numpy(host[:used]))
        lora_segmented.resolve(self.tables, self.directory, self.slots)

    @property
    def slots(self) -> Tensor:
        return torch.tensor(self.index.slots)

    def expected(
        self, y: Tensor, x: Tensor, rows: Sequence[Selection], layer: int, site: int
    ) -> Tensor:
        """y + sum of weight * x A.T B.T in float64, one row after the other."""
        total = y.double()
        for row, selection in enumerate(rows):
            for slot, weight in selection:
                total[row] += weight * self._change(x[row].double(), slot, layer, site)
        return total

    def _change(self, x: Tensor, slot: int, layer: int, site: int) -> Tensor:
        shape = self.sites[site]
        parts = []
        for name, out_features in zip(shape.projections, shape.out_features, strict=True):
            a, b = self.weights[slot].get((layer, name), (None, None))
            if a is None or b is None:
                parts.append(torch.zeros(out_features, dtype=torch.float64, device=x.device))
            else:
                parts.append((x @ a.double().t()) @ b.double())
        return torch.cat(parts)


def random_rows(
    num_rows: int,
    site: int,
    *,
    dtype: torch.dtype = torch.float32,
    sites: Sequence[LinearSpec] = SITES,
) -> tuple[Tensor, Tensor]:
    """x [rows, in] and y [rows, out]"""
    generator = torch.Generator().manual_seed(num_rows)
    shape = sites[site]
    x = torch.randn(num_rows, shape.in_features, generator=generator)
    y = torch.randn(num_rows, sum(shape.out_features), generator=generator)
    return x.to(dtype), y.to(dtype)


def make_world(
    ranks: Sequence[Mapping[str, int]],
    *,
    dtype: torch.dtype = torch.float32,
    limits: WorkLimits = LIMITS,
    launch: LaunchShape = LAUNCH,
    skip: Sequence[tuple[int, int]] = (),
    is_fp12: bool = False,
) -> LoraWorld:
    """ranks[slot]: projection -> rank, in every layer but those (slot, layer) in skip.

    is_fp12: A in fp12, all else in bfloat16
    """
    generator = torch.Generator().manual_seed(3)
    sites, page_width = (FP12_SITES, FP12_PAGE_ELEMENTS) if is_fp12 else (SITES, PAGE_ELEMENTS)
    dtype = torch.bfloat16 if is_fp12 else dtype
    layouts = [
        plan_rank_blocks(sites, places, page_width, is_fp12=is_fp12)
        for places in _places(ranks, skip)
    ]
    num_pages = sum(layout.num_pages for layout in layouts) + 2
    # What lies between the groups must never reach a result.
    pool = torch.full((num_pages, page_width), float("nan"), dtype=dtype)
    pages = torch.randperm(num_pages, generator=generator).tolist()
    tables = [tabulate(one, projections=PROJECTIONS, num_layers=NUM_LAYERS) for one in layouts]
    max_blocks = sum(int(table.blocks_per_projection.sum()) for table in tables) + 3
    index = RankBlockDirectory(max_slots=len(ranks), max_blocks=max_blocks)
    directory = torch.zeros(NUM_LAYERS, max_blocks, 4, dtype=torch.int32)
    weights = []
    for layout, table in zip(layouts, tables, strict=True):
        page_ids = [pages.pop() for _ in range(layout.num_pages)]
        _, start = index.add(table.blocks_per_projection)
        entries = torch.from_numpy(table.addresses(page_ids))
        directory[:, start : start + entries.shape[1]] = entries
        weights.append(_fill(pool, layout, page_ids, sites, generator))
    return LoraWorld(
        pool=pool,
        directory=directory,
        index=index,
        tables=make_tables(
            [SiteShape(site.name, site.in_features, site.out_features) for site in sites],
            num_layers=NUM_LAYERS,
            limits=limits,
            launch=replace(launch, is_fp12=is_fp12),
            device=pool.device,
        ),
        sites=sites,
        weights=weights,
    )


def _places(
    ranks: Sequence[Mapping[str, int]], skip: Sequence[tuple[int, int]]
) -> list[dict[tuple[int, str], int]]:
    return [
        {
            (layer, name): rank
            for layer in range(NUM_LAYERS)
            for name, rank in of_slot.items()
            if (slot, layer) not in skip
        }
        for slot, of_slot in enumerate(ranks)
    ]


def _fill(
    pool: Tensor,
    layout: RankBlockLayout,
    page_ids: Sequence[int],
    sites: Sequence[LinearSpec],
    generator: torch.Generator,
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Random A [rank, in] and B [rank, out] in their places."""
    shapes = {
        name: (site.in_features, out)
        for site in sites
        for name, out in zip(site.projections, site.out_features, strict=True)
    }
    weights: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    for (layer, name), groups in layout.blocks.items():
        sides: list[Tensor] = []
        for side, width in enumerate(shapes[name]):
            blocks = []
            for group in groups:
                block = torch.randn(group.num_ranks, width, generator=generator) / 4
                form = block = block.clamp(-1.9, 1.9).to(pool.dtype)
                if layout.is_fp12 and side == 0:
                    words = pack_fp12(block)
                    form = words.view(pool.dtype)
                    block = unpack_fp12(words)[: group.num_ranks].to(pool.dtype)
                page, start = divmod((group.a_offset, group.b_offset)[side], layout.page_width)
                pool[page_ids[page], start : start + form.numel()] = form.reshape(-1)
                blocks.append(block)
            sides.append(torch.cat(blocks))
        weights[layer, name] = (sides[0], sides[1])
    return weights


SEGMENTED = LoraMode(LoraPath.SEGMENTED)
SEGMENTED_ATTENTION = LoraMode(LoraPath.SEGMENTED, sites=ATTENTION_SITES)
AUGMENTED = LoraMode(LoraPath.AUGMENTED)
AUGMENTED_NARROW = LoraMode(LoraPath.AUGMENTED, num_blocks=8)
AUGMENTED_ATTENTION = LoraMode(LoraPath.AUGMENTED, sites=ATTENTION_SITES)
LORA_MODES = (
    AUGMENTED,
    AUGMENTED_NARROW,
    AUGMENTED_ATTENTION,
    SEGMENTED,
    SEGMENTED_ATTENTION,
)
"""All modes with adapters, in the order of capture."""
