"""Recycles the host memory of adapter images."""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import torch

from loramux.adapters.packed.image import mapped_memory


class HostBuffers:
    """Keeps the memory of freed images for the next image of the same size.

    Page faults on new memory take longer than the load that fills it. At most `spare_bytes` are
    kept, and at most `budget_bytes` are used by images and spare memory together.
    """

    def __init__(self, *, spare_bytes: int, budget_bytes: int) -> None:
        self.spare_bytes = spare_bytes
        self._budget_bytes = budget_bytes
        self._spares: list[mmap.mmap] = []
        self._num_used_bytes = 0
        # Reentrant: a garbage collection under the lock may free another buffer.
        self._lock = threading.RLock()

    @property
    def num_spare_bytes(self) -> int:
        with self._lock:
            return sum(len(memory) for memory in self._spares)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized buffer; it may hold the bytes of an earlier image."""
        memory = self._take(max(1, num_elements) * dtype.itemsize)
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, self._recycle, memory).atexit = False
        return torch.from_numpy(array).view(dtype)[:num_elements]

    def _take(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            self._num_used_bytes += num_bytes
            for number, memory in enumerate(self._spares):
                if len(memory) == num_bytes:
                    return self._spares.pop(number)
            self._drop_spares()
        return mapped_memory(num_bytes)

    def _recycle(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._num_used_bytes -= len(memory)
            if len(memory) <= self.spare_bytes:
                self._spares.append(memory)
            self._drop_spares()

    def _drop_spares(self) -> None:
        """Frees spare memory, oldest first, until it is within the limits."""
        limit = min(self.spare_bytes, self._budget_bytes - self._num_used_bytes)
        while self._spares and self.num_spare_bytes > limit:
            del self._spares[0]
