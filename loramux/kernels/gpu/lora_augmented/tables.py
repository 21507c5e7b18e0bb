"""Adapters' A behind the base weights: what the kernels that use it are told.

A base weight has a tail of blocks, each with 16 rows for every slice of its site, so that the
base's matrix product gives h = x @ A.T of all blocks beside y: [rows, outputs + tail]. In bfloat16
that h is rounded once more than the float32 sums of `shrink` are.
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
    """How kernels that run anyway add h @ B to what they read of y."""

    tile_rows: int
    """Rows of one adapter that are computed together: 1, or as many as a tile has, at most: 16 that
    share what is read of B, or a multiple of 16 that do so one after the other."""
    max_blocks: int = 1 << 16
    """Blocks that the product computes, from the first on: few where bytes or sums are dear."""
    narrow_blocks: int | None = None
    """The same for steps whose adapters need no more; None: there is no such difference."""
    fuses_norm: bool = True
    """Without it o and down have a launch of their own, for tiles alone."""
    rotate_warps: int = 1
    """For a row, as all that follows."""
    activate_n: int = 512
    """Outputs of a program."""
    activate_warps: int = 2
    norm_warps: int = 16

    def __post_init__(self) -> None:
        assert self.tile_rows == 1 or self.tile_rows % 16 == 0, "matrix units have 16 rows"
        assert self.fuses_norm or self.tile_rows > 1, "a row alone is added where it is normed"


# On an H200, Llama-3.1-8B shapes, by benchmarks/gpu_tail.py.
_LEAST_ROWS = AugmentedLaunch(tile_rows=1, max_blocks=4)
_FEW_ROWS = AugmentedLaunch(tile_rows=1, narrow_blocks=8)
_SOME_ROWS = AugmentedLaunch(tile_rows=16, narrow_blocks=8)
_MORE_ROWS = replace(_SOME_ROWS, max_blocks=8, narrow_blocks=None, fuses_norm=False)
_MOST_ROWS = replace(_MORE_ROWS, tile_rows=64)
# The most rows of each.
_LAUNCHES = ((4, _LEAST_ROWS), (16, _FEW_ROWS), (192, _SOME_ROWS), (384, _MORE_ROWS))


def augmented_launch(num_rows: int) -> AugmentedLaunch:
    """For steps of up to num_rows rows."""
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
    def record_start(self) -> int:
        return self.tables.record_start(self.layer, self.site)

    def max_tiles(self, num_rows: int) -> int:
        """Programs for the tiles of a step; one with more is looped over."""
        tiles = num_rows
        if self.launch.tile_rows > 1:
            tiles = min(num_rows, num_rows // self.launch.tile_rows + _USUAL_RUNS)
        # A program reads the record of one tile more than it has.
        assert 2 * tiles <= self.tables.limits.max_items, "the tables are too small for the step"
        return tiles


# Selections in one step.
_USUAL_RUNS = 12
# Elements of one load.
_MOST_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class AugmentedWeights:
    """The tails of all weights."""

    weights: tuple[tuple[Tensor, ...], ...]
    """[layers][sites] of [blocks, slices, 16, in]"""
    places: Tensor
    """int64 [layers, projections]: where block 0 begins, in elements from the pool's first."""
    shapes: Tensor
    """int32 [projections, 2]: inputs, and slices of the site."""
    alignment: int
    """Divides all inputs and places: as many elements may be read at once."""
    is_fp12: bool
    """Is A in twelve bits where it is copied from?"""

    @property
    def num_blocks(self) -> int:
        return self.weights[0][0].shape[0]


def make_augmented_weights(
    weights: Sequence[Sequence[Tensor]], pool: Tensor, *, is_fp12: bool = False
) -> AugmentedWeights:
    places, shapes = [], []
    for of_layer in weights:
        places.append([_elements_from(pool, w[0, i]) for w in of_layer for i in range(w.shape[1])])
    for weight in weights[0]:
        num_slices, _, num_inputs = weight.shape[1:]
        shapes += [[num_inputs, num_slices]] * num_slices
    numbers = [number for row in places for number in row] + [inputs for inputs, _ in shapes]
    return AugmentedWeights(
        weights=tuple(tuple(of_layer) for of_layer in weights),
        places=torch.tensor(places, dtype=torch.int64).to(pool.device),
        shapes=torch.tensor(shapes, dtype=torch.int32).to(pool.device),
        alignment=math.gcd(_MOST_AT_ONCE, *numbers),
        is_fp12=is_fp12,
    )


def _elements_from(pool: Tensor, target: Tensor) -> int:
    num_bytes = target.data_ptr() - pool.data_ptr()
    assert num_bytes % pool.itemsize == 0, "tensors begin at multiples of their elements"
    return num_bytes // pool.itemsize
