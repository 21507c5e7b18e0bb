"""The memory of the page pool: one allocation for KV blocks and adapter weights, in bytes."""

from __future__ import annotations

import numpy as np
import torch

from loramux.adapters.packed.file import SLICE_BYTES
from loramux.memory.device import Fence, StreamCopier, zeros


class PagePool:
    """Pages of `page_bytes` bytes; `view` reads them as elements of a dtype."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        # Zeros, not empty: unwritten KV is read and masked, and 0 * NaN is NaN.
        self._storage = zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
        # Zeroing words is faster than zeroing bytes.
        word = torch.int32 if page_bytes % torch.int32.itemsize == 0 else torch.uint8
        self._words = self._storage.view(word)
        self._bytes = self._storage.numpy() if self._storage.is_cpu else None
        self._copier = StreamCopier(device) if device.type == "cuda" else None
        # First page of a load -> fence, until the load is written.
        self._fences: dict[int, Fence] = {}

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes

    def view(self, dtype: torch.dtype) -> PageView:
        """Return the pages as elements of a dtype; the bytes of a page must be a multiple."""
        return PageView(self._storage.view(dtype))

    def fence(self, page_ids: list[int]) -> None:
        """Make the next write of these pages wait for the steps launched so far (GPU only)."""
        if self._copier is not None:
            self._fences[page_ids[0]] = Fence(self.device)

    def write(self, page_ids: list[int], buffer: torch.Tensor) -> None:
        """Copy a flat buffer into pages, in order; the rest of the last page is not written.

        Any thread may call it. On a GPU the copy runs on a stream of its own.
        """
        source = buffer.view(torch.uint8)
        if self._copier is not None:
            pairs = copy_pairs(self._storage, page_ids, source)
            self._copier.copy(pairs, after=self._fences.pop(page_ids[0], None))
            return
        data = source.numpy().data
        for start in range(0, len(data), SLICE_BYTES):
            self.write_slice(page_ids, start, data[start : start + SLICE_BYTES])

    def write_slice(self, page_ids: list[int], start: int, data: memoryview) -> None:
        """Copy a part of a flat buffer into pages, from byte `start` on (CPU only).

        It uses numpy: torch would start an OpenMP team for the calling thread, on the step loop's
        cores.
        """
        assert self._bytes is not None
        source = np.frombuffer(data, dtype=np.uint8)
        width, memory = self.page_bytes, self._bytes.reshape(-1)
        while len(source):
            number, offset = divmod(start, width)
            # One copy per run of contiguous pages: between copies the thread needs the GIL.
            count = 1
            while (
                number + count < len(page_ids)
                and page_ids[number + count] == page_ids[number] + count
            ):
                count += 1
            first = page_ids[number] * width
            target = memory[first + offset : first + count * width][: len(source)]
            np.copyto(target, source[: len(target)])
            start += len(target)
            source = source[len(target) :]

    def clear(self, page_ids: list[int]) -> None:
        """Zeroes pages, so that no data of an earlier owner can reach a new one."""
        if self._words.is_cpu:
            # index_fill_ takes four times as long on a CPU.
            for page_id in page_ids:
                self._words[page_id].zero_()
        else:
            self._words.index_fill_(0, torch.tensor(page_ids, device=self._words.device), 0)


class PageView:
    """Pages of a pool as elements of one dtype."""

    def __init__(self, storage: torch.Tensor) -> None:
        self.storage = storage
        """[pages, elements]"""
        self.width: int = storage.shape[1]
        """Elements of a page."""

    def pages_for(self, num_elements: int) -> int:
        return -(-num_elements // self.width)

    def address(self, page_id: int) -> int:
        return self.storage.data_ptr() + page_id * self.width * self.storage.element_size()

    def read(self, page_ids: list[int], out: torch.Tensor) -> None:
        """Copy pages, in order, into `out` [len(page_ids) * elements of a page]."""
        index = torch.tensor(page_ids, device=self.storage.device)
        torch.index_select(self.storage, 0, index, out=out.view(len(page_ids), -1))


def copy_pairs(
    storage: torch.Tensor, page_ids: list[int], buffer: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (target, source) for each run of contiguous pages, in the order of the buffer."""
    width = storage.shape[1]
    pairs = []
    first = 0
    for index in range(1, len(page_ids) + 1):
        if index < len(page_ids) and page_ids[index] == page_ids[index - 1] + 1:
            continue
        source = buffer[first * width : index * width]
        start = page_ids[first] * width
        pairs.append((storage.view(-1)[start : start + source.numel()], source))
        first = index
    return pairs
