"""An adapter as one contiguous buffer, laid out as the device reads it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loramux.adapters.packed.dense import DenseLayout, Site, plan_dense
from loramux.errors import AdapterRefused

if TYPE_CHECKING:
    from loramux.adapters.packed.paged import RankBlockLayout
    from loramux.adapters.peft.reader import CheckedAdapter


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
    sites: tuple[Site, ...],
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
