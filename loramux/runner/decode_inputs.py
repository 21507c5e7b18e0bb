"""All that a decode step reads from the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loramux.lora.device_work import Ints
from loramux.runner.packed_words import PackedWords, align
from loramux.runner.token_feed import TokenFeed
from loramux.types import Chunk


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
        self._num_fed = align(max_sequences)
        # Reading a page table's unused columns must stay inside.
        num_page_words = (max_rows + 1) * max_pages
        sizes = [max_rows] * 5 + [2 * max_rows, num_lora_words, num_page_words]
        self._words = PackedWords(sizes, device, num_ahead=self._num_fed)
        fields = self._words.fields
        self.feed = TokenFeed(self._words.all[: self._num_fed])
        self._all_tokens = self._words.all[: self._num_fed + fields[0].shape[0]]
        self._sources, self.num_tokens, self._page_starts = fields[1:4]
        self.temperatures = fields[4].view(torch.float32)
        self.noise = fields[5].view(torch.float64)
        self.lora_words, self._pages = fields[6:]
        self._columns = torch.arange(max_pages, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """A new step, whose fields are then filled and sent."""
        self._words.begin()

    @property
    def host_lora_words(self) -> Ints:
        """Where the step's list of LoRA work is written before `send`."""
        return self._words.host[6]

    def fill(
        self, chunks: Sequence[Chunk], temperatures: Sequence[float], noise: Sequence[float]
    ) -> None:
        fields = self._words.host
        token_ids, sources, num_tokens, page_starts, host_temperatures, host_noise = fields[:6]
        pages = fields[7]
        for field in (token_ids, num_tokens, page_starts, host_temperatures, host_noise):
            field.fill(0)
        count = len(chunks)
        token_ids[:count] = [chunk.token_ids[0] for chunk in chunks]
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
        self._num_page_words = int(ends[-1])

    def send(self) -> None:
        """One copy; does not wait for the device."""
        self._words.send(self._num_page_words)

    def token_ids(self, num_rows: int) -> Tensor:
        """[rows] int32: each row's own token, or what the last step sampled for it."""
        return self._all_tokens.index_select(0, self._sources[:num_rows])

    def write_page_table(self, out: Tensor) -> None:
        """out [rows, max_pages] int32: each sequence's pages, then any."""
        index = self._page_starts[: out.shape[0], None] + self._columns
        torch.index_select(self._pages, 0, index.view(-1), out=out.view(-1))
