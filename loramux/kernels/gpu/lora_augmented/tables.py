"""Data of the kernels for augmented weights, and their launch parameters.

An augmented weight has rank blocks behind its rows, each with 16 rows for every slice of its site,
so that the base GEMM computes h = x @ A.T of all rank blocks beside y: [rows, outputs + appended
rows]. In bfloat16 that h is rounded once more than the float32 partial sums of a segmented
`shrink`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loramux.kernels.gpu.lora.tables import LoraTables, SiteCut


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentedLaunch:
    """How the elementwise kernels behind a GEMM add h @ B."""

    tile_rows: int
    """Rows of one adapter per CTA: 1 (FMAs), 16 (tensor cores), or a multiple of 16, computed 16 at
    a time with the same B."""
    max_blocks: int = 1 << 16
    """Rank blocks that the GEMM computes, from the first on; fewer where they cost too much."""
    narrow_blocks: int | None = None
    """max_blocks of steps whose adapters need no more; None: there is only one size."""
    fuses_norm: bool = True
    """Whether add_norm adds h @ B of o and down; if not, they have an expand launch for tiles."""
    rotate_warps: int = 1
    """Warps of rotate_write with one row per CTA; the fields below are for that case as well."""
    activate_n: int = 512
    """Outputs of an activate_mul CTA."""
    activate_warps: int = 2
    norm_warps: int = 16

    def __post_init__(self) -> None:
        assert self.tile_rows == 1 or self.tile_rows % 16 == 0, "an MMA has 16 rows"
        assert self.fuses_norm or self.tile_rows > 1, "single rows need the fused norm"


# Tuned on an H200 with the shapes of Llama-3.1-8B.
_LEAST_ROWS = AugmentedLaunch(tile_rows=1, max_blocks=4)
_FEW_ROWS = AugmentedLaunch(tile_rows=1, narrow_blocks=8)
_SOME_ROWS = AugmentedLaunch(tile_rows=16, narrow_blocks=8)
_MORE_ROWS = replace(_SOME_ROWS, max_blocks=8, narrow_blocks=None, fuses_norm=False)
_MOST_ROWS = replace(_MORE_ROWS, tile_rows=64)
# By the maximum number of rows.
_LAUNCHES = ((4, _LEAST_ROWS), (16, _FEW_ROWS), (192, _SOME_ROWS), (384, _MORE_ROWS))


def augmented_launch(num_rows: int) -> AugmentedLaunch:
    """Launch parameters of steps of up to num_rows rows."""
    return next((launch for most, launch in _LAUNCHES if num_rows <= most), _MOST_ROWS)


@dataclass(frozen=True, slots=True)
class AugmentedSite:
    """One site of one layer, in a step whose work list names blocks of augmented weights."""

    tables: LoraTables
    pool: Tensor
    """[pages, elements]"""
    launch: AugmentedLaunch
    layer: int
    site: int

    @property
    def cut(self) -> SiteCut:
        return self.tables.sites[self.site]

    @property
    def num_outputs(self) -> int:
        return sum(self.cut.shape.out_features)

    @property
    def item_start(self) -> int:
        return self.tables.item_start(self.layer, self.site)

    def max_tiles(self, num_rows: int) -> int:
        """CTAs for the tiles of a step; with more tiles they loop."""
        tiles = num_rows
        if self.launch.tile_rows > 1:
            tiles = min(num_rows, num_rows // self.launch.tile_rows + _USUAL_RUNS)
        # A CTA loads the item of one tile more than it has.
        assert 2 * tiles <= self.tables.limits.max_items, "the tables are too small for the step"
        return tiles


# Typical number of different selections in one step.
_USUAL_RUNS = 12
# Elements of the widest load.
_MAX_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class AugmentedWeights:
    """The rows appended to all base weights."""

    weights: tuple[tuple[Tensor, ...], ...]
    """[layers][sites] of [blocks, slices, 16, in]"""
    offsets: Tensor
    """int64 [layers, projections]: block 0, in elements relative to the pool's first one."""
    shapes: Tensor
    """int32 [projections, 2]: inputs, and number of slices of the site."""
    alignment: int
    """Divisor of all inputs and offsets: so many elements may be loaded at once."""
    is_fp12: bool
    """Whether A is in fp12 in the pool."""

    @property
    def num_blocks(self) -> int:
        return self.weights[0][0].shape[0]


def make_augmented_weights(
    weights: Sequence[Sequence[Tensor]], pool: Tensor, *, is_fp12: bool = False
) -> AugmentedWeights:
    offsets, shapes = [], []
    for of_layer in weights:
        offsets.append([_elements_from(pool, w[0, i]) for w in of_layer for i in range(w.shape[1])])
    for weight in weights[0]:
        num_slices, _, num_inputs = weight.shape[1:]
        shapes += [[num_inputs, num_slices]] * num_slices
    numbers = [number for row in offsets for number in row] + [inputs for inputs, _ in shapes]
    return AugmentedWeights(
        weights=tuple(tuple(of_layer) for of_layer in weights),
        offsets=torch.tensor(offsets, dtype=torch.int64).to(pool.device),
        shapes=torch.tensor(shapes, dtype=torch.int32).to(pool.device),
        alignment=math.gcd(_MAX_ALIGNMENT, *numbers),
        is_fp12=is_fp12,
    )


def _elements_from(pool: Tensor, target: Tensor) -> int:
    num_bytes = target.data_ptr() - pool.data_ptr()
    assert num_bytes % pool.itemsize == 0, "tensors begin at multiples of their elements"
    return num_bytes // pool.itemsize
