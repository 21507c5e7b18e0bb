"""Memory of images, used again by the next one."""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import torch

from loramux.adapters.packed.image import mapped_memory


class HostBuffers:
    """A system takes longer to give new memory than a load takes to fill it.

    So what an image leaves is kept for the next of its size, as long as there are no more than
    `spare_bytes` of that, and no more than `budget_bytes` of it and of images together.
    """

    def __init__(self, *, spare_bytes: int, budget_bytes: int) -> None:
        self.spare_bytes = spare_bytes
        self._budget_bytes = budget_bytes
        self._spares: list[mmap.mmap] = []
        self._num_used_bytes = 0
        # A buffer may be given back by a collection of garbage that begins under this very lock.
        self._lock = threading.RLock()

    @property
    def num_spare_bytes(self) -> int:
        with self._lock:
            return sum(len(memory) for memory in self._spares)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """What is in it is left from another: it has to be written as a whole."""
        memory = self._take(max(1, num_elements) * dtype.itemsize)
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return torch.from_numpy(array).view(dtype)[:num_elements]

    def _take(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            self._num_used_bytes += num_bytes
            for number, memory in enumerate(self._spares):
                if len(memory) == num_bytes:
                    return self._spares.pop(number)
            self._drop_spares()
        return mapped_memory(num_bytes)

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._num_used_bytes -= len(memory)
            if len(memory) <= self.spare_bytes:
                self._spares.append(memory)
            self._drop_spares()

    def _drop_spares(self) -> None:
        """The oldest first, until the others are within the limits."""
        limit = min(self.spare_bytes, self._budget_bytes - self._num_used_bytes)
        while self._spares and self.num_spare_bytes > limit:
            del self._spares[0]
