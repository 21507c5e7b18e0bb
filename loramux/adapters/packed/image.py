"""An adapter as one contiguous buffer, laid out as the device reads it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loramux.adapters.packed.dense import DenseLayout, plan_dense
from loramux.adapters.packed.fp12 import fits_fp12, pack_fp12, row_exponents
from loramux.errors import AdapterRefused
from loramux.types.model import FusedLinear

if TYPE_CHECKING:
    from loramux.adapters.packed.paged import RankBlock, RankBlockLayout
    from loramux.adapters.peft.reader import CheckedAdapter, LoraModule


# Makes room for so many elements; in pinned memory where the device wants that.
Allocate = Callable[[int, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AdapterImage:
    cid: str
    layout: DenseLayout | RankBlockLayout
    buffer: torch.Tensor
    """[num_elements], in the base's dtype, the scale folded into B."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


def mapped_memory(num_bytes: int) -> mmap.mmap:
    """Zeros that cost nothing until they are written, in huge pages where there are any."""
    # Private: Linux has no huge pages for what processes share, and small ones cost a load more
    # than all of its copies.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel that was built without them says so with an error; small pages do as well.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def mapped_buffer(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of its own, that goes back to the system with the tensor.

    The allocator would keep freed megabytes for later, in every thread, and a tier would take more
    than its budget.
    """
    memory = mapped_memory(max(1, num_elements) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)


def pack_dense(
    adapter: CheckedAdapter,
    sites: tuple[FusedLinear, ...],
    dtype: torch.dtype,
    allocate: Allocate = mapped_buffer,
) -> AdapterImage:
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
    # Checked once, in the dtype that is served: a value that was finite may overflow in float16.
    if not torch.isfinite(buffer.sum()) and not torch.isfinite(buffer).all():
        raise AdapterRefused(
            "overflow",
            f"Its weights, times their scale, are too large for {dtype}.",
            fix="Serve with dtype bfloat16 or float32.",
        )
    return AdapterImage(cid=adapter.cid, layout=layout, buffer=buffer)


def pack_rank_blocks(adapter: CheckedAdapter, layout: RankBlockLayout, out: torch.Tensor) -> None:
    """out [num_elements], pinned or not: the adapter's pages, the scale folded into B."""
    out.zero_()
    for module in adapter.modules:
        a, b = _matrices(module, out.dtype, is_fp12=layout.is_fp12)
        # In the dtype that is served: a value that was finite may overflow in float16.
        if not _is_finite(b) or not _is_finite(a) or (layout.is_fp12 and not fits_fp12(a)):
            raise AdapterRefused(
                "overflow",
                f"Its weights, times their scale, are too large for {out.dtype}.",
                fix=f"Serve with dtype {'' if layout.is_fp12 else 'bfloat16 or '}float32.",
            )
        for group in layout.blocks[module.target.layer, module.target.projection]:
            _pack_group(a, b, group, out, is_fp12=layout.is_fp12)


def _matrices(
    module: LoraModule, dtype: torch.dtype, *, is_fp12: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [rank, out], as they are served; in a short A rows begin at 1 or above."""
    a, b = module.a.to(dtype), module.b.t().float() * module.scale
    if is_fp12:
        # Of what is rounded already: it may have become the next power of two.
        exponents = row_exponents(a)
        a, b = torch.ldexp(a.float(), -exponents).to(dtype), torch.ldexp(b, exponents)
    return a, b.to(dtype)


def _is_finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _pack_group(
    a: torch.Tensor, b: torch.Tensor, group: RankBlock, out: torch.Tensor, *, is_fp12: bool
) -> None:
    ranks = slice(group.rank_start, group.rank_start + group.num_ranks)
    a_block = pack_fp12(a[ranks]).view(out.dtype) if is_fp12 else a[ranks]
    for offset, block in ((group.a_offset, a_block), (group.b_offset, b[ranks])):
        out[offset : offset + block.numel()].view(block.shape).copy_(block)
