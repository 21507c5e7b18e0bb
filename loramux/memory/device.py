"""The one place that asks the machine about its memory, and the only one that may use CUDA."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

_DEFAULT_POOL_LIMIT = 4 * 2**30


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_pool_bytes() -> int:
    return min(total_memory_bytes() // 4, _DEFAULT_POOL_LIMIT)


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that costs nothing until it is written, in huge pages where it can."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def host_buffer(device: torch.device) -> Callable[[int, torch.dtype], Tensor]:
    """Makes buffers that are copied to the device: pinned when it is a GPU."""
    is_pinned = device.type == "cuda"

    def allocate(num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=is_pinned)

    return allocate
