"""Packed images of adapters that are in memory."""

from __future__ import annotations

from typing import Any

import torch

from loramux.adapters.packed.extras import ExtraSpec
from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.packing import DensePacking, Packing
from loramux.adapters.packed.paged import RankBlockLayout
from loramux.adapters.packed.writers import RankBlockWriter, check_range, write_extra
from loramux.adapters.peft.parts import ExtraTensor
from loramux.types.model import LinearSpec

PAGE_ELEMENTS = 4096


def pack_image(adapter: Any, packing: Packing) -> AdapterImage:
    extras = getattr(adapter, "extras", ())
    layout = packing.plan(
        {(m.target.layer, m.target.projection): m.rank for m in adapter.modules},
        [spec_of(part) for part in extras],
    )
    buffer = packing.allocate(layout.num_elements, packing.dtype)
    write = packing.writer(layout, buffer)
    packing.check(adapter.modules, [write(module) for module in adapter.modules])
    for part in extras:
        write_extra(layout.extras, buffer, part)
    return AdapterImage(cid=adapter.cid, layout=layout, buffer=buffer)


def spec_of(part: ExtraTensor, token_ids: tuple[int, ...] = ()) -> ExtraSpec:
    layer, module, kind = part.key
    num_rows, width = part.values.shape
    return ExtraSpec(layer, module, kind, num_rows, width, token_ids)


def pack_dense(adapter: Any, sites: tuple[LinearSpec, ...], dtype: torch.dtype) -> AdapterImage:
    return pack_image(adapter, DensePacking(sites, dtype, PAGE_ELEMENTS * dtype.itemsize))


def pack_rank_blocks(adapter: Any, layout: RankBlockLayout, out: torch.Tensor) -> None:
    """Write the adapter's pages to out [num_elements]."""
    write = RankBlockWriter(layout, out)
    maxima = [write(module) for module in adapter.modules]
    check_range(adapter.modules, maxima, out.dtype, is_fp12=layout.is_fp12)
