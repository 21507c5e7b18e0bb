"""The host inputs of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loramux.lora.segmented import Ints
from loramux.runner.host_buffer import HostBuffer, align
from loramux.runner.page_tables import PageTables
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.step import Chunk


class DecodeInputs:
    """One row per sequence at fixed addresses; rows without tokens are padding.

    The last step's tokens precede this step's in memory, so that one index addresses both.
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
        self._num_fed = align(2 * max_sequences)
        num_page_words = PageTables.most_words(max_rows, max_pages)
        sizes = [max_rows] * 5 + [2 * max_rows, num_lora_words, num_page_words]
        self._words = HostBuffer(sizes, device, num_ahead=self._num_fed)
        fields = self._words.fields
        self.token_buffer = TokenBuffer(self._words.all[: self._num_fed])
        self._all_tokens = self._words.all[: self._num_fed + fields[0].shape[0]]
        self._sources, self.num_tokens = fields[1:3]
        self.pages = PageTables(self._words, starts=3, max_pages=max_pages)
        self.temperatures = fields[4].view(torch.float32)
        self.noise = fields[5].view(torch.float64)
        self.lora_words = fields[6]

    def begin(self) -> None:
        """Begin a step, whose fields are then filled and sent."""
        self._words.begin()

    @property
    def host_lora_words(self) -> Ints:
        """Destination of the step's LoRA work list, to be written before `send`."""
        return self._words.host[6]

    def fill(
        self, chunks: Sequence[Chunk], temperatures: Sequence[float], noise: Sequence[float]
    ) -> None:
        token_ids, sources, num_tokens, _, host_temperatures, host_noise = self._words.host[:6]
        for field in (token_ids, num_tokens, host_temperatures, host_noise):
            field.fill(0)
        count = len(chunks)
        token_ids[:count] = [chunk.token_ids[0] for chunk in chunks]
        sources[:] = range(self._num_fed, self._num_fed + len(sources))
        for row, chunk in enumerate(chunks):
            place = self.token_buffer.place(chunk)
            if place is not None:
                sources[row] = place
        num_tokens[:count] = [chunk.start + 1 for chunk in chunks]
        host_temperatures.view(np.float32)[:count] = temperatures
        host_noise.view(np.float64)[:count] = noise
        self.pages.fill(chunks)

    def fill_padding(self) -> None:
        """Fill the fields of a step without sequences."""
        self.fill((), (), ())

    def send(self) -> None:
        """Copy all fields to the device at once, without waiting for it."""
        self._words.send(self.pages.num_words)

    def token_ids(self, num_rows: int) -> Tensor:
        """Gather each row's token from the host inputs or from the last step: [rows] int32."""
        return self._all_tokens.index_select(0, self._sources[:num_rows])
