"""Adapters in augmented base weights, and steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from loramux.kernels.gpu.lora.work_list import build_work_list, gather_tiles, map_rows
from loramux.kernels.gpu.lora_augmented.tables import (
    AugmentedLaunch,
    AugmentedSite,
    AugmentedWeights,
    make_augmented_weights,
)
from loramux.kernels.reference import lora_segmented
from tests.lora_factory import LIMITS, NUM_LAYERS, LoraWorld, Selection, make_world

ROW = AugmentedLaunch(tile_rows=1, activate_n=32, activate_warps=1, norm_warps=1)
TILE = replace(ROW, tile_rows=16)
LONG_TILE = replace(ROW, tile_rows=64)


@dataclass
class AugmentedWorld:
    lora: LoraWorld
    bases: list[list[Tensor]]
    """[layers][sites] of [out, in]"""
    weights: AugmentedWeights
    blocks: np.ndarray[tuple[int, int], np.dtype[np.int32]]

    def step(self, rows: Sequence[Selection], launch: AugmentedLaunch) -> None:
        """Write the step's work list to the tables; every row has an item."""
        tables = self.lora.tables
        limits = replace(
            LIMITS, few_rows=int(launch.tile_rows == 1), max_rows=len(rows), max_h_rows=0
        )
        host = np.full(limits.num_words, 99, dtype=np.int32)
        tiles = gather_tiles(rows, [1] * len(rows), launch.tile_rows, keeps_base=True)
        build_work_list(tiles, self.lora.index, limits, host, self.blocks)
        map_rows(limits, host)
        self.lora.tables = replace(tables, limits=limits, work=torch.tensor(host))
        lora_segmented.resolve(self.lora.tables, self.lora.directory, self.lora.slots)

    def at(self, layer: int, site: int, launch: AugmentedLaunch) -> AugmentedSite:
        return AugmentedSite(self.lora.tables, self.lora.pool, launch, layer, site)

    def gemm(self, x: Tensor, layer: int, site: int) -> Tensor:
        """Return the GEMM of the augmented weight: [rows, outputs + appended rows]."""
        return x @ self._augmented(layer, site).t()

    def split_k(self, x: Tensor, layer: int, site: int, splits: int) -> Tensor:
        """Return the GEMM's split-K partial sums: float32 [splits, rows, outputs +
        appended rows].
        """
        weight = self._augmented(layer, site).float()
        columns = zip(x.float().chunk(splits, 1), weight.chunk(splits, 1), strict=True)
        return torch.stack([some @ of_weight.t() for some, of_weight in columns])

    def _augmented(self, layer: int, site: int) -> Tensor:
        base = self.bases[layer][site]
        appended = self.weights.weights[layer][site].reshape(-1, base.shape[1])
        return torch.cat((base, appended))

    def expected(self, x: Tensor, rows: Sequence[Selection], layer: int, site: int) -> Tensor:
        """y with the rows' adapters, one after the other in float64."""
        y = x.double() @ self.bases[layer][site].double().t()
        return self.lora.expected(y, x, rows, layer, site).to(x.dtype)


def make_augmented_world(
    ranks: Sequence[dict[str, int]],
    kernels: ModuleType,
    *,
    dtype: torch.dtype = torch.float32,
    skip: Sequence[tuple[int, int]] = (),
    is_fp12: bool = False,
) -> AugmentedWorld:
    """Copy every adapter to augmented weights, the last block first; free blocks are NaN."""
    lora = make_world(ranks, dtype=dtype, skip=skip, is_fp12=is_fp12)
    dtype = lora.pool.dtype
    num_blocks = int(lora.index.num_blocks.sum()) + 2
    generator = torch.Generator().manual_seed(5)
    bases, appended = [], []
    for _ in range(NUM_LAYERS):
        shapes = [(sum(site.out_features), site.in_features) for site in lora.sites]
        bases.append([(torch.randn(s, generator=generator) / 8).to(dtype) for s in shapes])
        appended.append(
            [
                torch.full(
                    (num_blocks, len(site.projections), 16, site.in_features),
                    float("nan"),
                    dtype=dtype,
                )
                for site in lora.sites
            ]
        )
    weights = make_augmented_weights(appended, lora.pool, is_fp12=is_fp12)
    blocks = np.zeros((len(ranks), num_blocks), dtype=np.int32)
    block = num_blocks - 2
    for slot in range(len(ranks)):
        for index in range(lora.index.num_blocks[slot]):
            blocks[slot, index] = block
            kernels.copy_block(
                *(weights, lora.pool, lora.directory, lora.slots),
                rank_block=(slot, index),
                block=block,
            )
            block -= 1
    return AugmentedWorld(lora, bases, weights, blocks)


def two_ctas(monkeypatch: pytest.MonkeyPatch, *, is_early: bool) -> None:
    """Launch two CTAs for the tiles of a step; is_early: B is loaded before y."""
    from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu

    monkeypatch.setattr(AugmentedSite, "max_tiles", lambda *_: 2)
    monkeypatch.setattr(augmented_gpu, "_reads_b_early", lambda _: is_early)
