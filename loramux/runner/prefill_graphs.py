"""CUDA graphs of steps with prefill, one for each token count and LoRA mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.kernels.ops import DeviceAttentionPlan, DeviceKernels, StepRows
from loramux.lora.extras_step import (
    DECODE_TILE_ROWS,
    PREFILL_TILE_ROWS,
    ExtrasStep,
    ExtrasWork,
    graph_limits,
)
from loramux.lora.graph_lora import GraphLora, LoraMode
from loramux.runner.extras_inputs import ExtrasInputs
from loramux.runner.gpu_decoder import GpuDecoder
from loramux.runner.gpu_sampler import DeviceLogits, SampleInputs
from loramux.runner.prefill_inputs import PrefillInputs, PrefillLimits
from loramux.runner.step_graphs import Key, StepGraphs
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.request import Selection
from loramux.types.step import Chunk

# Below 256 tokens padding costs little, above that its full share; at 448 the GEMMs of an 8B model
# take longer than at 512. Larger steps run longer than their kernels take to launch one by one.
TOKEN_COUNTS = (
    *(32, 64, 128, 192, 256, 320, 384, 512, 640),
    *(768, 896, 1024, 1280, 1536, 1792, 2048),
)


def token_counts(max_tokens: int) -> list[int]:
    most = min(max_tokens, TOKEN_COUNTS[-1])
    return [count for count in TOKEN_COUNTS if count < most] + [most]


class PrefillGraphs:
    """All graphs share inputs and logits, so that one of them runs at a time."""

    def __init__(  # noqa: PLR0913
        self,
        decoder: GpuDecoder,
        kernels: DeviceKernels,
        lora: GraphLora,
        token_buffer: TokenBuffer,
        device: torch.device,
        *,
        max_tokens: int,
        max_sequences: int,
        max_pages: int,
        extras: ExtrasWork | None = None,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self.lora = lora
        self._token_buffer = token_buffer
        self._counts = token_counts(max_tokens)
        most = self._counts[-1]
        self._max_sequences = max_sequences
        self._windows = sorted(decoder.windows, key=str)
        self._q = torch.empty(
            1, decoder.num_heads, decoder.layout.head_dim, dtype=decoder.dtype, device=device
        )
        self._num_items = {count: self._most_items(count) for count in self._counts}
        limits = PrefillLimits(
            max_tokens=most,
            max_sequences=max_sequences,
            max_pages=max_pages,
            block_tokens=decoder.layout.block_tokens,
            num_items=tuple(self._num_items[most] * len(self._windows)),
            num_lora_words=lora.num_words,
        )
        self._inputs = PrefillInputs(limits, token_buffer, device)
        lora.segmented.read_from(self._inputs.lora_words[: limits.num_lora_words])
        self._extras: tuple[ExtrasInputs, ExtrasInputs] | None = None
        if extras is not None:
            of_rows = graph_limits(most, max_sequences, PREFILL_TILE_ROWS)
            of_logits = graph_limits(max_sequences, max_sequences, DECODE_TILE_ROWS)
            self._extras = (
                ExtrasInputs(extras, of_rows, device),
                ExtrasInputs(extras, of_logits, device),
            )
        self._page_table = torch.zeros(max_sequences, max_pages, dtype=torch.int32, device=device)
        self._logits = decoder.empty_logits(min(most, max_sequences))
        self._plan = self._largest_plan()
        # Views of the first rows, by their number.
        self._logits_of: dict[int, DeviceLogits] = {}
        self._steps = StepGraphs(device, self._compute)

    @property
    def keys(self) -> list[Key]:
        """All graphs to capture, the largest first: the others reuse its memory."""
        return [
            (count, mode) for count in reversed(self._counts) for mode in self.lora.modes(count)
        ]

    @property
    def largest(self) -> list[Key]:
        """The graphs of the largest size, which every step with a graph can run on."""
        return [(self._counts[-1], mode) for mode in self.lora.modes(self._counts[-1])]

    @property
    def graphs(self) -> StepGraphs:
        return self._steps

    @torch.inference_mode()
    def capture(self, key: Key) -> None:
        """Capture a graph if it is new. Its first run is of padding rows, which write no keys."""
        if not self._steps.is_ready(key):
            self._clear(key)
        self._steps.get(key)

    @torch.inference_mode()
    def trace(self, key: Key) -> None:
        """Launch the kernels of a graph once, over padding rows, without capturing them."""
        self._clear(key)
        self._compute(*key)

    def _clear(self, key: Key) -> None:
        """Send the inputs of a step of padding rows alone."""
        num_rows, mode = key
        self._inputs.begin()
        self.lora.fill_padding(mode, num_rows, self._inputs.host_lora_words)
        self._inputs.fill_padding()
        self._inputs.send()
        if mode.extras:
            assert self._extras is not None, "adapters have no parts beside low rank"
            for inputs in self._extras:
                inputs.send_padding()

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], samples: SampleInputs) -> DeviceLogits | None:
        """Launch a step; return the logits of each chunk with a sample row, in order.

        Returns None if no graph fits. See DecodeGraphs.launch.
        """
        lengths = [len(chunk.token_ids) for chunk in chunks]
        num_rows = sum(lengths)
        if num_rows > self._counts[-1] or len(chunks) > self._max_sequences:
            return None
        items = self._items(chunks, lengths)
        self._inputs.begin()
        key = self._choose([chunk.selection for chunk in chunks], lengths, items)
        if key is None or not self._fill_extras(key[1], chunks, lengths):
            return None
        self._inputs.fill(chunks, samples, items)
        self._inputs.send()
        self._steps.run(key)
        return self._device_logits(len(samples.noise))

    def _fill_extras(self, mode: LoraMode, chunks: Sequence[Chunk], lengths: Sequence[int]) -> bool:
        """Send the lists of parts beside low rank, if the mode has any; False: they do not fit."""
        if not mode.extras:
            return True
        assert self._extras is not None, "adapters have no parts beside low rank"
        of_rows, of_logits = self._extras
        sampled = [chunk.selection for chunk in chunks if chunk.sample is not None]
        fits = of_rows.fill([chunk.selection for chunk in chunks], lengths)
        if not fits or not of_logits.fill(sampled, [1] * len(sampled)):
            return False
        of_rows.send()
        of_logits.send()
        return True

    def _choose(
        self, selections: Sequence[Selection], lengths: Sequence[int], items: Sequence[Tensor]
    ) -> Key | None:
        """Write the LoRA work list; return the smallest graph that is captured.

        If none is, the smallest one; None if the step does not fit into the smallest one, or runs
        without a graph until one for its mode is captured.
        """
        num_rows, words = sum(lengths), self._inputs.host_lora_words
        smallest: Key | None = None
        for count in self._counts:
            if count < num_rows:
                continue
            if not self._fits(count, items):
                return None
            mode = self.lora.fill(selections, lengths, count, words)
            if mode is None:
                return None
            if self._steps.is_ready((count, mode)):
                if smallest is not None:
                    self._steps.miss(smallest)
                return count, mode
            smallest = smallest or (count, mode)
        if smallest is not None and smallest[1].extras:
            self._steps.miss(smallest)
            return None
        if smallest is not None:
            self.lora.fill(selections, lengths, smallest[0], words)
        return smallest

    def _fits(self, count: int, items: Sequence[Tensor]) -> bool:
        most = self._num_items[count] * len(self._windows)
        return all(len(some) <= limit for some, limit in zip(items, most, strict=True))

    def _most_items(self, num_rows: int) -> list[int]:
        return self._kernels.attention.max_items(
            num_rows, self._max_sequences, self._q, self._decoder.layout
        )

    def _items(self, chunks: Sequence[Chunk], lengths: Sequence[int]) -> list[Tensor]:
        rows = StepRows.of_lengths(lengths, [chunk.start for chunk in chunks])
        return [
            items
            for window in self._windows
            for items in self._kernels.attention.partition_steps(
                rows, window, self._q, self._decoder.layout
            )
        ]

    def _largest_plan(self) -> DeviceAttentionPlan:
        inputs = self._inputs
        kinds = len(self._num_items[self._counts[-1]])
        items = {
            window: inputs.items[place * kinds : (place + 1) * kinds]
            for place, window in enumerate(self._windows)
        }
        return self._kernels.attention.plan_steps(
            self._page_table, inputs.slots, self._q, self._decoder.layout, items
        )

    def _compute(self, num_rows: int, mode: LoraMode) -> None:
        """Compute a step without reading values from the device, so that it can be captured."""
        inputs = self._inputs
        num_logits = min(num_rows, self._logits.shape[0])
        inputs.pages.write_table(self._page_table)
        plan = self._plan.first_rows(num_rows, self._num_items[num_rows])
        lora = self.lora.begin(mode, num_rows)
        of_rows, of_logits = self._extras_steps(mode)
        hidden = self._decoder.hidden(
            inputs.token_ids(num_rows),
            inputs.positions[:num_rows],
            plan,
            lora,
            of_rows,
        )
        logits: Tensor = self._logits[:num_logits]
        last_rows = inputs.last_rows[:num_logits]
        self._decoder.write_logits(hidden.index_select(0, last_rows), logits, of_logits)
        self._token_buffer.store(self._device_logits(num_logits).choose(self._kernels.sampling))

    @property
    def first_logits(self) -> DeviceLogits:
        """The first row of logits."""
        return self._device_logits(1)

    def _device_logits(self, num_rows: int) -> DeviceLogits:
        found = self._logits_of.get(num_rows)
        if found is None:
            inputs, rows = self._inputs, slice(num_rows)
            found = self._logits_of[num_rows] = DeviceLogits(
                self._logits[rows], inputs.temperatures[rows], inputs.noise[rows]
            )
        return found

    def _extras_steps(self, mode: LoraMode) -> tuple[ExtrasStep | None, ExtrasStep | None]:
        if self._extras is None or not mode.extras:
            return None, None
        of_rows, of_logits = self._extras
        return of_rows.step(mode.extras), of_logits.step(mode.extras)
