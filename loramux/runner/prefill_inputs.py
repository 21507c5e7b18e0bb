"""All that a step with prompts reads from the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loramux.kernels.gpu.attention.split_kv import ITEM_FIELDS
from loramux.lora.segmented import Ints
from loramux.runner.device_sampler import Draws
from loramux.runner.host_buffer import PackedWords
from loramux.runner.page_tables import PageLists
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.step import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    max_rows: int
    max_sequences: int
    max_pages: int
    """Of one sequence."""
    block_tokens: int
    num_items: tuple[int, ...]
    """Attention's, list by list."""
    num_lora_words: int


class RowInputs:
    """Rows, sequences and items of fixed places on the device, each filled from the front.

    A row that is padding is stored nowhere and read by nobody.
    """

    def __init__(self, limits: RowLimits, feed: TokenBuffer, device: torch.device) -> None:
        self._limits = limits
        self._feed = feed
        rows, sequences = limits.max_rows, limits.max_sequences
        sizes = [rows] * 4 + [sequences] * 3 + [2 * sequences, limits.num_lora_words]
        self._first_items = len(sizes)
        sizes += [count * ITEM_FIELDS for count in limits.num_items]
        sizes.append(PageLists.most_words(sequences, limits.max_pages))
        self._words = PackedWords(sizes, device)
        fields = self._words.fields
        self._own_tokens, self._sources, self.positions, self.slots = fields[:4]
        self.last_rows = fields[4]
        self.pages = PageLists(self._words, starts=5, max_pages=limits.max_pages)
        self.temperatures = fields[6].view(torch.float32)
        self.noise = fields[7].view(torch.float64)
        self.lora_words = fields[8]
        self.items = [
            field[: count * ITEM_FIELDS].view(count, ITEM_FIELDS)
            for field, count in zip(fields[self._first_items : -1], limits.num_items, strict=True)
        ]

    def begin(self) -> None:
        """A new step, whose fields are then filled and sent."""
        self._words.begin()

    @property
    def host_lora_words(self) -> Ints:
        """Where the step's list of LoRA work is written before `send`."""
        return self._words.host[8]

    def fill(self, chunks: Sequence[Chunk], draws: Draws, items: Sequence[Tensor]) -> None:
        """draws: of the chunks that have a sample row."""
        fields = self._words.host
        lengths = np.fromiter((len(chunk.token_ids) for chunk in chunks), dtype=np.int32)
        starts = np.fromiter((chunk.start for chunk in chunks), dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        num_rows = int(ends[-1])
        token_ids, sources, positions, slots = fields[:4]
        for field, padding in ((token_ids, 0), (positions, 0), (slots, -1)):
            field[num_rows:] = padding
        token_ids[:num_rows] = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
        sources.fill(-1)
        for chunk, end in zip(chunks, ends.tolist(), strict=True):
            place = self._feed.place(chunk)
            if place is not None:
                sources[end - 1] = place
        owner = np.repeat(np.arange(len(chunks)), lengths)
        rows = np.arange(num_rows, dtype=np.int32)
        positions[:num_rows] = rows + (starts - (ends - lengths))[owner]
        page_starts = self.pages.fill(chunks)
        block = self._limits.block_tokens
        at = positions[:num_rows]
        pages = fields[-1][page_starts[owner] + at // block]
        slots[:num_rows] = pages * block + at % block
        self._fill_samples(chunks, ends - 1, draws)
        for field, some in zip(fields[self._first_items : -1], items, strict=True):
            field.fill(0)
            field[: some.numel()] = some.numpy().reshape(-1)

    def _fill_samples(self, chunks: Sequence[Chunk], last_rows: Ints, draws: Draws) -> None:
        last, _, temperatures, noise = self._words.host[4:8]
        count = len(draws.noise)
        for field in (last, temperatures, noise):
            field.fill(0)
        last[:count] = last_rows[[chunk.sample is not None for chunk in chunks]]
        temperatures.view(np.float32)[:count] = draws.temperatures
        noise.view(np.float64)[:count] = draws.noise

    def send(self) -> None:
        """One copy; does not wait for the device."""
        self._words.send(self.pages.num_words)

    def token_ids(self, num_rows: int) -> Tensor:
        """[rows] int32: each row's own token, or what the last step sampled for it."""
        own, sources = self._own_tokens[:num_rows], self._sources[:num_rows]
        return torch.where(sources < 0, own, self._feed.read(sources.clamp(min=0)))
