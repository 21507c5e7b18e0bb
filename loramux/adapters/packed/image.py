"""An adapter as one contiguous buffer, in the layout that the kernels read."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loramux.adapters.packed.dense import DenseLayout, plan_dense
from loramux.adapters.packed.fp12 import fits_fp12, pack_fp12, row_exponents
from loramux.adapters.packed.paged import RankBlock, RankBlockLayout
from loramux.errors import AdapterRefused
from loramux.types.model import FusedLinear

if TYPE_CHECKING:
    from loramux.adapters.peft.reader import CheckedAdapter, LoraModule


Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Allocates a buffer of so many elements, pinned if it is copied to a GPU."""
AdapterLayout = DenseLayout | RankBlockLayout


@dataclass(frozen=True, slots=True)
class AdapterImage:
    cid: str
    layout: AdapterLayout
    buffer: torch.Tensor
    """[num_elements] in the base's dtype, with the scale multiplied into B."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


def mapped_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory that is committed when it is written, in huge pages if available."""
    # Private, since Linux has no huge pages for shared mappings, and faulting in small pages costs
    # a load more than all of its copies.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages reports an error; small pages work as well.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def mapped_buffer(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocates a mapping of its own, which is returned to the system with the tensor.

    malloc would keep freed megabytes in the arena of every thread, and a tier would exceed its
    budget.
    """
    memory = mapped_memory(max(1, num_elements) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)


def pack_dense(
    adapter: CheckedAdapter,
    sites: tuple[FusedLinear, ...],
    dtype: torch.dtype,
    allocate: Allocate = mapped_buffer,
) -> AdapterImage:
    """Packs A as [in, sum of ranks] and B as [rank, out] of every site, without gaps."""
    modules = {(m.target.layer, m.target.projection): m for m in adapter.modules}
    layout = plan_dense(sites, {place: module.rank for place, module in modules.items()})
    buffer = allocate(layout.num_elements, dtype)
    projections = {site.name: site.projections for site in sites}
    for (layer, site_name), place in layout.places.items():
        a = buffer[place.a_offset :][: place.in_features * place.total_rank]
        a = a.view(place.in_features, place.total_rank)
        present = [modules[layer, p] for p in projections[site_name] if (layer, p) in modules]
        for piece, module in zip(place.slices, present, strict=True):
            a[:, piece.rank_start : piece.rank_start + piece.rank].copy_(module.a.t())
            b = buffer[piece.offset :][: piece.rank * piece.out_features]
            b.view(piece.rank, piece.out_features).copy_(module.b.t().float() * module.scale)
    # Checked in the served dtype: a finite value may overflow in float16.
    if not torch.isfinite(buffer.sum()) and not torch.isfinite(buffer).all():
        raise AdapterRefused(
            "overflow",
            f"Its weights, times their scale, are too large for {dtype}.",
            fix="Serve with dtype bfloat16 or float32.",
        )
    return AdapterImage(cid=adapter.cid, layout=layout, buffer=buffer)


def pack_rank_blocks(adapter: CheckedAdapter, layout: RankBlockLayout, out: torch.Tensor) -> None:
    """Writes the adapter's pages to out [num_elements], with the scale multiplied into B."""
    out.zero_()
    for module in adapter.modules:
        a, b = _matrices(module, out.dtype, is_fp12=layout.is_fp12)
        # Checked in the served dtype: a finite value may overflow in float16.
        if not _is_finite(b) or not _is_finite(a) or (layout.is_fp12 and not fits_fp12(a)):
            raise AdapterRefused(
                "overflow",
                f"Its weights, times their scale, are too large for {out.dtype}.",
                fix=f"Serve with dtype {'' if layout.is_fp12 else 'bfloat16 or '}float32.",
            )
        for block in layout.blocks[module.target.layer, module.target.projection]:
            _pack_block(a, b, block, out, is_fp12=layout.is_fp12)


def _matrices(
    module: LoraModule, dtype: torch.dtype, *, is_fp12: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [rank, out] as served; with fp12 the rows of A are scaled to [1, 2)."""
    a, b = module.a.to(dtype), module.b.t().float() * module.scale
    if is_fp12:
        # Exponents of the rounded values, since rounding may reach the next power of two.
        exponents = row_exponents(a)
        a, b = torch.ldexp(a.float(), -exponents).to(dtype), torch.ldexp(b, exponents)
    return a, b.to(dtype)


def _is_finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _pack_block(
    a: torch.Tensor, b: torch.Tensor, block: RankBlock, out: torch.Tensor, *, is_fp12: bool
) -> None:
    ranks = slice(block.rank_start, block.rank_start + block.num_ranks)
    packed_a = pack_fp12(a[ranks]).view(out.dtype) if is_fp12 else a[ranks]
    for offset, matrix in ((block.a_offset, packed_a), (block.b_offset, b[ranks])):
        out[offset : offset + matrix.numel()].view(matrix.shape).copy_(matrix)
