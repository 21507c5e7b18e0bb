"""The pages of a step's sequences, one list after another, and the table made of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loramux.lora.segmented import Ints
from loramux.runner.host_buffer import PackedWords
from loramux.types.step import Chunk


class PageLists:
    """In the last field of `words`, so that a copy ends with the last page; where each list begins
    is in the field `starts`."""

    def __init__(self, words: PackedWords, *, starts: int, max_pages: int) -> None:
        self._words = words
        self._starts = starts
        self._columns = torch.arange(max_pages, dtype=torch.int32, device=words.all.device)
        self.num_words = 0
        """Of this step's lists."""

    @staticmethod
    def most_words(num_sequences: int, max_pages: int) -> int:
        """Reading a table's unused columns must stay inside."""
        return (num_sequences + 1) * max_pages

    def fill(self, chunks: Sequence[Chunk]) -> Ints:
        """Where each chunk's list begins."""
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
        """out [sequences, max_pages] int32: each sequence's pages, then any."""
        starts, pages = self._words.fields[self._starts], self._words.fields[-1]
        index = starts[: out.shape[0], None] + self._columns
        torch.index_select(pages, 0, index.view(-1), out=out.view(-1))
