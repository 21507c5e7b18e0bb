"""The tensors through which LoRA kernels find a step's work; their addresses never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loramux.kernels.lora_work import (
    FIRST_USED,
    GROUP_RANKS,
    MAX_PROJECTIONS,
    MAX_SLICES,
    UNIT_WORDS,
    SiteShape,
    WorkLimits,
)

# Inputs beyond this get larger shrinks, so that an expand has fewer sums to add.
_WIDE_INPUT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How the work of a step is cut; measured, not derived."""

    block_k: int
    """Inputs that one shrink sums; an expand adds the sums of a row."""
    step_k: int = 64
    """Inputs that the shrink of a prompt reads at once."""
    shrink_warps: int
    shrinks_per_sm: int
    row_n: int
    """Outputs that an expand of one row writes."""
    tile_n: int
    """The same for a tile of rows."""
    expand_warps: int
    registers: int = 128
    """Of a thread; the compiler takes up to 255 where it may, and fewer programs fit."""
    expands_per_sm: int
    use_pdl: bool = False
    """Kernels start while the one before ends, and wait for it after reading their weights."""


@dataclass(frozen=True, slots=True)
class SiteCut:
    """One site's part of the list of projections, and how its inputs are cut."""

    shape: SiteShape
    first_projection: int
    block_k: int

    @property
    def num_splits(self) -> int:
        return -(-self.shape.in_features // self.block_k)


@dataclass(frozen=True, slots=True)
class LoraTables:
    sites: tuple[SiteCut, ...]
    limits: WorkLimits
    launch: LaunchShape
    num_sms: int
    max_splits: int
    work: Tensor
    """int32 [limits.num_words]: the step's list, as build_work wrote it."""
    records: Tensor
    """int32 [layers, max units, 8 projections, 8]: the units with their addresses, by resolve."""
    partials: Tensor
    """float32 [max h rows, slices, max splits, 16]: sums over a part of the inputs."""

    def record_start(self, layer: int, site: int) -> int:
        """Of a layer's first unit at a site's first projection, in words."""
        return layer * self.records.stride(0) + self.sites[site].first_projection * UNIT_WORDS

    def used_words(self, site: int) -> range:
        """Where a list says which of a site's projections its adapters change."""
        cut = self.sites[site]
        first = FIRST_USED + cut.first_projection
        return range(first, first + len(cut.shape.out_features))


def make_tables(
    sites: Sequence[SiteShape],
    *,
    num_layers: int,
    limits: WorkLimits,
    launch: LaunchShape,
    device: torch.device,
    num_sms: int = 1,
) -> LoraTables:
    cuts: list[SiteCut] = []
    first = 0
    for site in sites:
        scale = 2 if site.in_features > _WIDE_INPUT else 1
        cuts.append(SiteCut(site, first, launch.block_k * scale))
        first += len(site.out_features)
    max_splits = 1 << (max(cut.num_splits for cut in cuts) - 1).bit_length()
    records = (num_layers, limits.max_units, MAX_PROJECTIONS, UNIT_WORDS)
    partials = (limits.max_h_rows, MAX_SLICES, max_splits, GROUP_RANKS)
    return LoraTables(
        sites=tuple(cuts),
        limits=limits,
        launch=launch,
        num_sms=num_sms,
        max_splits=max_splits,
        work=torch.zeros(limits.num_words, dtype=torch.int32, device=device),
        records=torch.zeros(records, dtype=torch.int32, device=device),
        partials=torch.zeros(partials, dtype=torch.float32, device=device),
    )


# On an H200, Llama-3.1-8B shapes, by benchmarks/gpu_lora_kernels.py.
_FEW_ROWS = LaunchShape(
    block_k=256,
    shrink_warps=2,
    shrinks_per_sm=4,
    row_n=1024,
    tile_n=256,
    expand_warps=4,
    expands_per_sm=4,
)
# Runs of rows that are cut into single rows; with five and more the matrix units are as fast.
ALONE_ROWS = 4
_MANY_ROWS = replace(_FEW_ROWS, shrinks_per_sm=8)
PROMPT = LaunchShape(
    block_k=1024,
    shrink_warps=4,
    shrinks_per_sm=4,
    row_n=1024,
    tile_n=256,
    expand_warps=4,
    expands_per_sm=4,
    registers=255,
)


def decode_launch(num_rows: int, *, use_pdl: bool) -> LaunchShape:
    """For steps of up to num_rows rows. PDL needs compute capability 9."""
    return replace(_FEW_ROWS if num_rows <= 64 else _MANY_ROWS, use_pdl=use_pdl)
