"""All that a decode step reads from the host, in one buffer: one copy a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loramux.lora.device_work import Ints
from loramux.memory.device import host_buffer
from loramux.types import Chunk

# Fields begin at multiples of 64 bytes: vectors of any type can be read there.
_ALIGN_WORDS = 16


class DecodeInputs:
    """Rows of fixed places on the device, filled from the front; a row without tokens is padding.

    The sequences' pages lie one after another at the end, so that a copy ends with the last.
    """

    def __init__(
        self, *, max_rows: int, max_pages: int, num_lora_words: int, device: torch.device
    ) -> None:
        self._max_pages = max_pages
        rows = _align(max_rows)
        sizes = [rows, rows, rows, rows, 2 * rows, _align(num_lora_words)]
        # Reading a page table's unused columns must stay inside.
        sizes.append((max_rows + 1) * max_pages)
        self._host = host_buffer(device)(sum(sizes), torch.int32)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host.zero_()
        fields = torch.split(self._device, sizes)
        self.token_ids, self.num_tokens, self._page_starts = fields[:3]
        self.temperatures = fields[3].view(torch.float32)
        self.noise = fields[4].view(torch.float64)
        self.lora_words, self._pages = fields[5:]
        self._columns = torch.arange(max_pages, dtype=torch.int32, device=device)
        self._fields = np.split(self._host.numpy(), np.cumsum(sizes)[:-1])
        self._pages_at = sum(sizes[:-1])

    @property
    def host_lora_words(self) -> Ints:
        """Where the step's list of LoRA work is written before `send`."""
        return self._fields[5]

    def fill(
        self, chunks: Sequence[Chunk], temperatures: Sequence[float], noise: Sequence[float]
    ) -> None:
        token_ids, num_tokens, page_starts, host_temperatures, host_noise, _, pages = self._fields
        for field in (token_ids, num_tokens, page_starts, host_temperatures, host_noise):
            field.fill(0)
        count = len(chunks)
        token_ids[:count] = [chunk.token_ids[0] for chunk in chunks]
        num_tokens[:count] = [chunk.start + 1 for chunk in chunks]
        host_temperatures.view(np.float32)[:count] = temperatures
        host_noise.view(np.float64)[:count] = noise
        lengths = [len(chunk.page_ids) for chunk in chunks]
        ends = np.cumsum(lengths)
        page_starts[1:count] = ends[:-1]
        all_pages = chain.from_iterable(chunk.page_ids for chunk in chunks)
        pages[: ends[-1]] = np.fromiter(all_pages, dtype=np.int32, count=int(ends[-1]))
        self._num_words = self._pages_at + int(ends[-1])

    def send(self) -> None:
        """One copy; the host's buffer may be filled again when the device has read it."""
        words = self._num_words
        self._device[:words].copy_(self._host[:words], non_blocking=True)

    def write_page_table(self, out: Tensor) -> None:
        """out [rows, max_pages] int32: each sequence's pages, then any."""
        index = self._page_starts[: out.shape[0], None] + self._columns
        torch.index_select(self._pages, 0, index.view(-1), out=out.view(-1))


def _align(num_words: int) -> int:
    return -(-num_words // _ALIGN_WORDS) * _ALIGN_WORDS
