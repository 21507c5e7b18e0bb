"""Memory of images, used again by the next one."""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import torch

from loramux.adapters.image import mapped_memory


class HostBuffers:
    """A system takes longer to give new memory than a load takes to fill it.

    So what an image leaves is kept for the next of its size, as long as there are no more than
    `spare_bytes` of that.
    """

    def __init__(self, *, spare_bytes: int) -> None:
        self.spare_bytes = spare_bytes
        self._spares: list[mmap.mmap] = []
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
            for number, memory in enumerate(self._spares):
                if len(memory) == num_bytes:
                    return self._spares.pop(number)
        return mapped_memory(num_bytes)

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(memory) > self.spare_bytes:
            return
        with self._lock:
            self._spares.append(memory)
            while self.num_spare_bytes > self.spare_bytes:
                del self._spares[0]
