"""An adapter as one contiguous buffer, in the layout that the kernels read."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from loramux.adapters.packed.dense import DenseLayout
from loramux.adapters.packed.paged import RankBlockLayout

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
