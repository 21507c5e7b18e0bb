"""Page tables of a step: sent as concatenated lists, expanded on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loramux.lora.segmented import Ints
from loramux.runner.host_buffer import HostBuffer
from loramux.types.step import Chunk


class PageTables:
    """Keeps the page lists in the last field of a HostBuffer, and their starts in another."""

    def __init__(self, words: HostBuffer, *, starts: int, max_pages: int) -> None:
        self._words = words
        self._starts = starts
        self._columns = torch.arange(max_pages, dtype=torch.int32, device=words.all.device)
        self.num_words = 0
        """Words of this step's page lists."""

    @staticmethod
    def most_words(num_sequences: int, max_pages: int) -> int:
        """Return the size of the field, with room for reads of unused table columns."""
        return (num_sequences + 1) * max_pages

    def fill(self, chunks: Sequence[Chunk]) -> Ints:
        """Write the page lists; return the start of each chunk's list."""
        host = self._words.host
        lengths = np.fromiter((len(chunk.page_ids) for chunk in chunks), dtype=np.int32)
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        host[self._starts].fill(0)
        host[self._starts][: len(chunks)] = starts
        self.num_words = int(lengths.sum())
        page_ids = chain.from_iterable(chunk.page_ids for chunk in chunks)
        host[-1][: self.num_words] = np.fromiter(page_ids, dtype=np.int32, count=self.num_words)
        return starts

    def write_table(self, out: Tensor) -> None:
        """Expand the lists into out [sequences, max_pages] int32; unused columns are arbitrary."""
        starts, pages = self._words.fields[self._starts], self._words.fields[-1]
        index = starts[: out.shape[0], None] + self._columns
        torch.index_select(pages, 0, index.view(-1), out=out.view(-1))
