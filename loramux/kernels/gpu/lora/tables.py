"""The tensors through which LoRA kernels find a step's work; their addresses never change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loramux.kernels.gpu.lora.work_list import (
    FIRST_USED,
    MAX_PROJECTIONS,
    MAX_SLICES,
    RANK_BLOCK,
    UNIT_WORDS,
    SiteShape,
    WorkLimits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How the work of a step is cut; measured, not derived."""

    row_k: int = 4096
    """The most inputs that one shrink of few rows sums; an expand adds the sums of a row."""
    row_values: int = 16384
    """Weights, of two bytes each, that it reads at once: of so many ranks as that makes."""
    tile_k: int = 512
    """Inputs that one shrink of a tile of rows sums; more where there are many."""
    fp12_row_k: int = 1024
    """As row_k, where A is in twelve bits: by matrix units, for all ranks of a group at once."""
    step_k: int = 64
    """Of them, those that are read at once."""
    shrink_warps: int
    shrinks_per_sm: int
    expand_warps: int
    expands_per_sm: int
    shrink_registers: int = 128
    """Of a thread; the compiler takes up to 255 where it may, and fewer programs fit."""
    expand_registers: int = 128
    is_fp12: bool = False
    """Is A in twelve bits?"""
    use_pdl: bool = False
    """Kernels start while the one before ends, and wait for it after reading their weights."""

    @property
    def row_outputs(self) -> int:
        """That an expand of few rows writes."""
        return self.expand_warps * 32 * OUTPUTS_PER_THREAD

    def tile_outputs(self, num_bytes: int) -> int:
        """The same for a tile of rows; num_bytes: of an output, a lane reads 16 at once."""
        return self.expand_warps * 8 * (16 // num_bytes)

    def row_ranks(self, row_k: int, num_bytes: int) -> int:
        """Ranks that a shrink of few rows takes at once; num_bytes: of a weight."""
        return max(1, min(RANK_BLOCK, self.row_values * 2 // num_bytes // row_k))


@dataclass(frozen=True, slots=True)
class SiteCut:
    """One site's part of the list of projections, and how its inputs are cut."""

    shape: SiteShape
    first_projection: int
    row_k: int
    """Of units of few rows."""
    tile_k: int
    """Of tiles of rows."""

    @property
    def row_splits(self) -> int:
        return -(-self.shape.in_features // self.row_k)

    @property
    def tile_splits(self) -> int:
        return -(-self.shape.in_features // self.tile_k)


@dataclass(frozen=True, slots=True)
class LoraTables:
    sites: tuple[SiteCut, ...]
    limits: WorkLimits
    launch: LaunchShape
    num_sms: int
    max_splits: int
    work: Tensor
    """int32 [limits.num_words]: the step's list, as build_work_list wrote it."""
    records: Tensor
    """int32 [layers, max units, 8 projections, 8]: the units with their addresses, by resolve."""
    partials: Tensor
    """float32 [max h rows, slices, max splits, 16]: sums over a part of the inputs."""

    @property
    def is_fp12(self) -> bool:
        """Do adapters have their A in twelve bits?"""
        return self.launch.is_fp12

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
    cuts = _cuts(sites, launch)
    max_splits = _most_splits(cuts)
    records = (num_layers, limits.max_items, MAX_PROJECTIONS, UNIT_WORDS)
    partials = (limits.max_h_rows, MAX_SLICES, max_splits, RANK_BLOCK)
    return LoraTables(
        sites=cuts,
        limits=limits,
        launch=launch,
        num_sms=num_sms,
        max_splits=max_splits,
        work=torch.zeros(limits.num_words, dtype=torch.int32, device=device),
        records=torch.zeros(records, dtype=torch.int32, device=device),
        partials=torch.zeros(partials, dtype=torch.float32, device=device),
    )


def _cuts(sites: Iterable[SiteShape], launch: LaunchShape) -> tuple[SiteCut, ...]:
    cuts: list[SiteCut] = []
    first = 0
    for site in sites:
        row_k = _row_inputs(site.in_features, launch.fp12_row_k if launch.is_fp12 else launch.row_k)
        tile_k = _tile_inputs(site.in_features, launch.tile_k)
        if launch.is_fp12:
            row_k, tile_k = (max(size, _LEAST_SHORT_INPUTS) for size in (row_k, tile_k))
        cuts.append(SiteCut(site, first, row_k, tile_k))
        first += len(site.out_features)
    return tuple(cuts)


def _most_splits(cuts: Iterable[SiteCut]) -> int:
    return max(max(cut.row_splits, cut.tile_splits) for cut in cuts)


def _row_inputs(num_inputs: int, most: int) -> int:
    """A power of two: all inputs, or a part such that the last one leaves little of it empty."""
    whole = 1 << (num_inputs - 1).bit_length()
    if whole <= most:
        return whole
    sizes = (most, most // 2, most // 4)
    return next((k for k in sizes if -num_inputs % k * 8 <= num_inputs), sizes[-1])


def _tile_inputs(num_inputs: int, least: int) -> int:
    """A power of two that makes no more parts than an expand should add."""
    return max(least, 1 << (-(-num_inputs // _MOST_TILE_PARTS) - 1).bit_length())


OUTPUTS_PER_THREAD = 4
"""Of an expand of few rows."""
SMALL_ROWS = 8
"""Of a small tile: A in twelve bits goes to matrix units as for single rows."""

_MOST_TILE_PARTS = 16
# A block of 128 for each of four warps.
_LEAST_SHORT_INPUTS = 512

# On an H200, Llama-3.1-8B shapes, by benchmarks/gpu_lora_kernels.py.
_DECODE = LaunchShape(
    step_k=128,
    shrink_warps=4,
    shrinks_per_sm=4,
    expand_warps=2,
    expands_per_sm=8,
)
PROMPT = LaunchShape(
    shrink_warps=4,
    shrinks_per_sm=4,
    expand_warps=2,
    expands_per_sm=8,
    shrink_registers=255,
)


def decode_launch(*, use_pdl: bool) -> LaunchShape:
    """For steps of few rows of each adapter. PDL needs compute capability 9."""
    return replace(_DECODE, use_pdl=use_pdl)
