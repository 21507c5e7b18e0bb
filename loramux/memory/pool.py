"""The memory of the page pool: one allocation for KV blocks and adapter weights."""

from __future__ import annotations

import numpy as np
import torch

from loramux.adapters.packed.file import SLICE_BYTES
from loramux.memory.device import Fence, StreamCopier, zeros
from loramux.types.model import PagedLayout


class PagePool:
    """Holds `storage` [pages, elements]; a KV page is [layer][K, V][token][kv head][head dim].

    The tokens of a page are contiguous, so that gathered pages are one [tokens, heads, dim] array.
    """

    def __init__(
        self, *, num_pages: int, geometry: PagedLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        # Zeros, not empty: unwritten KV is read and masked, and 0 * NaN is NaN.
        self.storage = zeros((num_pages, geometry.page_elements), dtype=dtype, device=device)
        self._bytes = self.storage.view(torch.uint8).numpy() if self.storage.is_cpu else None
        self._copier = StreamCopier(device) if device.type == "cuda" else None
        # First page of a load -> fence, until the load is written.
        self._fences: dict[int, Fence] = {}

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def page_bytes(self) -> int:
        return self.geometry.page_elements * self.storage.element_size()

    def pages_for_elements(self, num_elements: int) -> int:
        return -(-num_elements // self.geometry.page_elements)

    def fence(self, page_ids: list[int]) -> None:
        """Makes the next write of these pages wait for the steps launched so far (GPU only)."""
        if self._copier is not None:
            self._fences[page_ids[0]] = Fence(self.device)

    def write(self, page_ids: list[int], buffer: torch.Tensor) -> None:
        """Copies a flat buffer into pages, in order; the rest of the last page is not written.

        Any thread may call it. On a GPU the copy runs on a stream of its own.
        """
        if self._copier is not None:
            pairs = copy_pairs(self.storage, page_ids, buffer)
            self._copier.copy(pairs, after=self._fences.pop(page_ids[0], None))
            return
        data = buffer.view(torch.uint8).numpy().data
        for start in range(0, len(data), SLICE_BYTES):
            self.write_slice(page_ids, start, data[start : start + SLICE_BYTES])

    def write_slice(self, page_ids: list[int], start: int, data: memoryview) -> None:
        """Copies a part of a flat buffer into pages, from byte `start` on (CPU only).

        It uses numpy: torch would start an OpenMP team for the calling thread, on the step loop's
        cores.
        """
        assert self._bytes is not None
        source = np.frombuffer(data, dtype=np.uint8)
        width, memory = self._bytes.shape[1], self._bytes.reshape(-1)
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
        if self.storage.is_cpu:
            # index_fill_ takes four times as long on a CPU.
            for page_id in page_ids:
                self.storage[page_id].zero_()
        else:
            self.storage.index_fill_(0, torch.tensor(page_ids, device=self.storage.device), 0)

    def address(self, page_id: int) -> int:
        return self.storage.data_ptr() + page_id * self.page_bytes

    def read(self, page_ids: list[int], out: torch.Tensor) -> None:
        """Copies pages, in order, into `out` [len(page_ids) * page elements]."""
        index = torch.tensor(page_ids, device=self.storage.device)
        torch.index_select(self.storage, 0, index, out=out.view(len(page_ids), -1))


def copy_pairs(
    storage: torch.Tensor, page_ids: list[int], buffer: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns (target, source) for each run of contiguous pages, in the order of the buffer."""
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
