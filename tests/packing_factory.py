"""Packed images of adapters that are in memory."""

from __future__ import annotations

from typing import Any

import torch

from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.packing import DensePacking, Packing
from loramux.adapters.packed.paged import RankBlockLayout
from loramux.adapters.packed.writers import RankBlockWriter, check_range
from loramux.types.model import FusedLinear


def pack_image(adapter: Any, packing: Packing) -> AdapterImage:
    layout = packing.plan({(m.target.layer, m.target.projection): m.rank for m in adapter.modules})
    buffer = packing.allocate(layout.num_elements, packing.dtype)
    write = packing.writer(layout, buffer)
    packing.check(adapter.modules, [write(module) for module in adapter.modules])
    return AdapterImage(cid=adapter.cid, layout=layout, buffer=buffer)


def pack_dense(adapter: Any, sites: tuple[FusedLinear, ...], dtype: torch.dtype) -> AdapterImage:
    return pack_image(adapter, DensePacking(sites, dtype))


def pack_rank_blocks(adapter: Any, layout: RankBlockLayout, out: torch.Tensor) -> None:
    """Writes the adapter's pages to out [num_elements]."""
    write = RankBlockWriter(layout, out)
    maxima = [write(module) for module in adapter.modules]
    check_range(adapter.modules, maxima, out.dtype, is_fp12=layout.is_fp12)
