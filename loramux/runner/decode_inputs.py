"""All that a decode step reads from the host, in one buffer: one copy a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loramux.lora.device_work import Ints
from loramux.memory.device import Fence, host_buffer
from loramux.runner.token_feed import TokenFeed
from loramux.types import Chunk

# Fields begin at multiples of 64 bytes: vectors of any type can be read there.
_ALIGN_WORDS = 16


class DecodeInputs:
    """Rows of fixed places on the device, filled from the front; a row without tokens is padding.

    The sequences' pages lie one after another at the end, so that a copy ends with the last. The
    last step's tokens lie in front of this step's, so that both are found by one index.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_sequences: int,
        max_pages: int,
        num_lora_words: int,
        device: torch.device,
    ) -> None:
        rows = _align(max_rows)
        sizes = [rows, rows, rows, rows, rows, 2 * rows, _align(num_lora_words)]
        # Reading a page table's unused columns must stay inside.
        sizes.append((max_rows + 1) * max_pages)
        self._num_fed = _align(max_sequences)
        words = torch.zeros(self._num_fed + sum(sizes), dtype=torch.int32, device=device)
        self.feed = TokenFeed(words[: self._num_fed])
        self._all_tokens = words[: self._num_fed + rows]
        self._device = words[self._num_fed :]
        fields = torch.split(self._device, sizes)
        self._sources, self.num_tokens, self._page_starts = fields[1:4]
        self.temperatures = fields[4].view(torch.float32)
        self.noise = fields[5].view(torch.float64)
        self.lora_words, self._pages = fields[6:]
        self._columns = torch.arange(max_pages, dtype=torch.int32, device=device)
        self._pages_at = sum(sizes[:-1])
        # While the device reads the one, the other is filled.
        self._hosts = [_Host(sizes, device) for _ in range(2)]

    def begin(self) -> None:
        """A new step, whose fields are then filled and sent."""
        self._hosts.reverse()
        self._hosts[0].wait()

    @property
    def host_lora_words(self) -> Ints:
        """Where the step's list of LoRA work is written before `send`."""
        return self._hosts[0].fields[6]

    def fill(
        self, chunks: Sequence[Chunk], temperatures: Sequence[float], noise: Sequence[float]
    ) -> None:
        fields = self._hosts[0].fields
        token_ids, sources, num_tokens, page_starts, host_temperatures, host_noise = fields[:6]
        pages = fields[7]
        for field in (num_tokens, page_starts, host_temperatures, host_noise):
            field.fill(0)
        count = len(chunks)
        token_ids[:count] = [chunk.token_ids[0] for chunk in chunks]
        token_ids[count:] = 0
        sources[:] = range(self._num_fed, self._num_fed + len(sources))
        for row, chunk in enumerate(chunks):
            place = self.feed.place(chunk)
            if place is not None:
                sources[row] = place
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
        host, words = self._hosts[0], self._num_words
        self._device[:words].copy_(host.words[:words], non_blocking=True)
        host.sent(self._device.device)

    def token_ids(self, num_rows: int) -> Tensor:
        """[rows] int32: each row's own token, or what the last step sampled for it."""
        return self._all_tokens.index_select(0, self._sources[:num_rows])

    def write_page_table(self, out: Tensor) -> None:
        """out [rows, max_pages] int32: each sequence's pages, then any."""
        index = self._page_starts[: out.shape[0], None] + self._columns
        torch.index_select(self._pages, 0, index.view(-1), out=out.view(-1))


class _Host:
    """The host's side of the fields, and when the device has read them."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.words = host_buffer(device)(sum(sizes), torch.int32)
        self.words.zero_()
        self.fields: list[Ints] = np.split(self.words.numpy(), np.cumsum(sizes)[:-1])
        self._fence: Fence | None = None

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._fence = Fence(device)

    def wait(self) -> None:
        if self._fence is not None:
            self._fence.wait()


def _align(num_words: int) -> int:
    return -(-num_words // _ALIGN_WORDS) * _ALIGN_WORDS
