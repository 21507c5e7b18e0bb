"""The device tensors of a step's LoRA work, at fixed addresses, and the launch parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loramux.kernels.gpu.lora.work_list import (
    FIRST_USED,
    ITEM_WORDS,
    MAX_PROJECTIONS,
    MAX_SLICES,
    RANK_BLOCK,
    SiteShape,
    WorkLimits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """Tile sizes and resources of the segmented kernels; found by measurement."""

    row_k: int = 4096
    """K of a shrink tile of few rows, at most; the expand reduces the split-K partial sums."""
    row_values: int = 16384
    """Two-byte weights that such a tile loads at once; this determines its number of ranks."""
    tile_k: int = 512
    """K of a shrink tile of many rows, at least."""
    fp12_row_k: int = 1024
    """row_k with A in fp12: tensor cores take all ranks of a rank block at once."""
    step_k: int = 64
    """K of one iteration of such a tile."""
    shrink_warps: int
    shrinks_per_sm: int
    expand_warps: int
    expands_per_sm: int
    shrink_registers: int = 128
    """Register limit of a thread (maxnreg); more registers mean fewer resident CTAs."""
    expand_registers: int = 128
    is_fp12: bool = False
    """Whether A is stored in fp12."""
    use_pdl: bool = False
    """Programmatic dependent launch: kernels load their weights before the one ahead ends."""

    @property
    def row_outputs(self) -> int:
        """Outputs of an expand tile of few rows."""
        return self.expand_warps * 32 * OUTPUTS_PER_THREAD

    def tile_outputs(self, num_bytes: int) -> int:
        """Output of an expand tile of many rows; num_bytes of an output, a thread loads 16."""
        return self.expand_warps * 8 * (16 // num_bytes)

    def row_ranks(self, row_k: int, num_bytes: int) -> int:
        """Ranks of a shrink tile of few rows; num_bytes of a weight."""
        return max(1, min(RANK_BLOCK, self.row_values * 2 // num_bytes // row_k))


@dataclass(frozen=True, slots=True)
class SiteCut:
    """One site: its position in the list of projections, and its split-K sizes."""

    shape: SiteShape
    first_projection: int
    row_k: int
    """K of a tile of few rows."""
    tile_k: int
    """K of a tile of many rows."""

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
    """int32 [limits.num_words]: the step's work list, as build_work_list wrote it."""
    items: Tensor
    """int32 [layers, max items, 8 projections, 8]: the work items with addresses, by resolve."""
    partials: Tensor
    """float32 [max h rows, slices, max splits, 16]: split-K partial sums of the shrink."""

    @property
    def is_fp12(self) -> bool:
        """Whether adapters have their A in fp12."""
        return self.launch.is_fp12

    def item_start(self, layer: int, site: int) -> int:
        """Offset, in words, of a layer's first item at the site's first projection."""
        return layer * self.items.stride(0) + self.sites[site].first_projection * ITEM_WORDS

    def used_words(self, site: int) -> range:
        """Words of the work list that say which of the site's projections its adapters change."""
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
    max_splits = _max_splits(cuts)
    items = (num_layers, limits.max_items, MAX_PROJECTIONS, ITEM_WORDS)
    partials = (limits.max_h_rows, MAX_SLICES, max_splits, RANK_BLOCK)
    return LoraTables(
        sites=cuts,
        limits=limits,
        launch=launch,
        num_sms=num_sms,
        max_splits=max_splits,
        work=torch.zeros(limits.num_words, dtype=torch.int32, device=device),
        items=torch.zeros(items, dtype=torch.int32, device=device),
        partials=torch.zeros(partials, dtype=torch.float32, device=device),
    )


def _cuts(sites: Iterable[SiteShape], launch: LaunchShape) -> tuple[SiteCut, ...]:
    cuts: list[SiteCut] = []
    first = 0
    for site in sites:
        row_k = _row_inputs(site.in_features, launch.fp12_row_k if launch.is_fp12 else launch.row_k)
        tile_k = _tile_inputs(site.in_features, launch.tile_k)
        if launch.is_fp12:
            row_k, tile_k = (max(size, _MIN_FP12_INPUTS) for size in (row_k, tile_k))
        cuts.append(SiteCut(site, first, row_k, tile_k))
        first += len(site.out_features)
    return tuple(cuts)


def _max_splits(cuts: Iterable[SiteCut]) -> int:
    return max(max(cut.row_splits, cut.tile_splits) for cut in cuts)


def _row_inputs(num_inputs: int, most: int) -> int:
    """Return a power of two: all inputs, or a split size whose last split is nearly full."""
    whole = 1 << (num_inputs - 1).bit_length()
    if whole <= most:
        return whole
    sizes = (most, most // 2, most // 4)
    return next((k for k in sizes if -num_inputs % k * 8 <= num_inputs), sizes[-1])


def _tile_inputs(num_inputs: int, least: int) -> int:
    """Return a power of two that makes no more splits than an expand should reduce."""
    return max(least, 1 << (-(-num_inputs // _MAX_TILE_SPLITS) - 1).bit_length())


OUTPUTS_PER_THREAD = 4
"""Adjacent outputs of a thread in an expand of few rows."""
SMALL_ROWS = 8
"""Rows of a small tile, at most: an fp12 shrink treats it like a single row."""

_MAX_TILE_SPLITS = 16
# A block of 128 for each of four warps.
_MIN_FP12_INPUTS = 512

# On an H200, Llama-3.1-8B shapes, by benchmarks/lib/gpu_lora.py.
_DECODE = LaunchShape(
    step_k=128,
    shrink_warps=4,
    shrinks_per_sm=4,
    expand_warps=2,
    expands_per_sm=8,
)
PREFILL_LAUNCH = LaunchShape(
    shrink_warps=4,
    shrinks_per_sm=4,
    expand_warps=2,
    expands_per_sm=8,
    shrink_registers=255,
)


def decode_launch(*, use_pdl: bool) -> LaunchShape:
    """Launch parameters of steps with few rows per adapter. PDL needs compute capability 9."""
    return replace(_DECODE, use_pdl=use_pdl)
