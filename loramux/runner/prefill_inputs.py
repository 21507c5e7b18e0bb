"""The host inputs of a step with prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loramux.kernels.gpu.attention.split_kv import ITEM_FIELDS
from loramux.lora.segmented import Ints
from loramux.runner.gpu_sampler import SampleInputs
from loramux.runner.host_buffer import HostBuffer
from loramux.runner.page_tables import PageTables
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.step import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    max_tokens: int
    max_sequences: int
    max_pages: int
    """Pages of the longest sequence."""
    block_tokens: int
    num_items: tuple[int, ...]
    """Most attention work items, by tile shape and window."""
    num_lora_words: int


class PrefillInputs:
    """Tokens, sequences and attention work items at fixed addresses, each filled from the front.

    Padding rows have slot -1: their keys and values are not stored.
    """

    def __init__(
        self, limits: PrefillLimits, token_buffer: TokenBuffer, device: torch.device
    ) -> None:
        self._limits = limits
        self._token_buffer = token_buffer
        rows, sequences = limits.max_tokens, limits.max_sequences
        sizes = [rows] * 4 + [sequences] * 3 + [2 * sequences, limits.num_lora_words]
        self._first_items = len(sizes)
        sizes += [count * ITEM_FIELDS for count in limits.num_items]
        sizes.append(PageTables.most_words(sequences, limits.max_pages))
        self._words = HostBuffer(sizes, device)
        fields = self._words.fields
        self._own_tokens, self._sources, self.positions, self.slots = fields[:4]
        self.sampled_rows = fields[4]
        self.pages = PageTables(self._words, starts=5, max_pages=limits.max_pages)
        self.temperatures = fields[6].view(torch.float32)
        self.noise = fields[7].view(torch.float64)
        self.lora_words = fields[8]
        self.items = [
            field[: count * ITEM_FIELDS].view(count, ITEM_FIELDS)
            for field, count in zip(fields[self._first_items : -1], limits.num_items, strict=True)
        ]

    def begin(self) -> None:
        """Begin a step, whose fields are then filled and sent."""
        self._words.begin()

    @property
    def host_lora_words(self) -> Ints:
        """Destination of the step's LoRA work list, to be written before `send`."""
        return self._words.host[8]

    def fill(
        self,
        chunks: Sequence[Chunk],
        sampled: Sequence[int],
        samples: SampleInputs,
        items: Sequence[Tensor],
    ) -> None:
        """Fill all fields; `samples` holds the inputs of the sampled rows."""
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
            place = self._token_buffer.place(chunk)
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
        self._fill_samples(sampled, samples)
        for field, some in zip(fields[self._first_items : -1], items, strict=True):
            field.fill(0)
            field[: some.numel()] = some.numpy().reshape(-1)

    def fill_padding(self) -> None:
        """Fill the fields of a step without sequences."""
        fields = self._words.host
        lora_words = self._first_items - 1
        for number, field in enumerate(fields[:-1]):
            if number != lora_words:
                field.fill(0)
        sources, slots = fields[1], fields[3]
        sources.fill(-1)
        slots.fill(-1)
        self.pages.fill(())

    def _fill_samples(self, sampled: Sequence[int], samples: SampleInputs) -> None:
        rows, _, temperatures, noise = self._words.host[4:8]
        count = len(sampled)
        for field in (rows, temperatures, noise):
            field.fill(0)
        rows[:count] = sampled
        temperatures.view(np.float32)[:count] = samples.temperatures
        noise.view(np.float64)[:count] = samples.noise

    def send(self) -> None:
        """Copy all fields to the device at once, without waiting for it."""
        self._words.send(self.pages.num_words)

    def token_ids(self, num_rows: int) -> Tensor:
        """Gather each row's token from the host inputs or from the last step: [rows] int32."""
        own, sources = self._own_tokens[:num_rows], self._sources[:num_rows]
        return torch.where(sources < 0, own, self._token_buffer.read(sources.clamp(min=0)))
