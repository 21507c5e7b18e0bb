"""CUDA graphs of steps with prefill, one for each token count and LoRA mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.kernels.ops import DeviceAttentionPlan, DeviceKernels, StepRows
from loramux.lora.extras_step import (
    DECODE_TILE_ROWS,
    PREFILL_TILE_ROWS,
    ExtrasWork,
    graph_limits,
)
from loramux.lora.graph_lora import GraphLora, LoraMode
from loramux.runner.captured_graphs import CapturedGraphs
from loramux.runner.extras_inputs import ExtrasInputs
from loramux.runner.gpu_decoder import GpuDecoder
from loramux.runner.gpu_sampler import DeviceLogits, SampleInputs
from loramux.runner.prefill_inputs import PrefillInputs, PrefillLimits
from loramux.runner.row_uses import RowUses
from loramux.runner.token_buffer import TokenBuffer
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


class PrefillGraphs(CapturedGraphs[PrefillInputs]):
    """The graphs of steps with prefill, by token count."""

    kind = "prefill"

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
        counts = token_counts(max_tokens)
        most = counts[-1]
        self._token_buffer = token_buffer
        self._max_sequences = max_sequences
        self._windows = sorted(decoder.windows, key=str)
        heads, dtype = (decoder.num_heads, decoder.layout.head_dim), decoder.attention_dtype
        self._q = torch.empty(1, *heads, dtype=dtype, device=device)
        self._num_items = {
            count: kernels.attention.max_items(count, max_sequences, self._q, decoder.layout)
            for count in counts
        }
        limits = PrefillLimits(
            max_tokens=most,
            max_sequences=max_sequences,
            max_pages=max_pages,
            block_tokens=decoder.layout.block_tokens,
            num_items=tuple(self._num_items[most] * len(self._windows)),
            num_lora_words=lora.num_words,
        )
        inputs = PrefillInputs(limits, token_buffer, device)
        super().__init__(counts, inputs, decoder, kernels, lora, device)
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

    @torch.inference_mode()
    def launch(
        self, chunks: Sequence[Chunk], uses: RowUses, samples: SampleInputs
    ) -> DeviceLogits | None:
        lengths = [len(chunk.token_ids) for chunk in chunks]
        num_rows = sum(lengths)
        if num_rows > self._sizes[-1] or len(chunks) > self._max_sequences:
            return None
        if len(uses.sampled) > len(self._logits):
            return None
        items = self._items(chunks, lengths)
        self._inputs.begin()
        key = self._choose([chunk.selection for chunk in chunks], lengths, num_rows, items)
        if key is None or (key[1].extras and not self._send_parts(chunks, lengths, uses)):
            return None
        self._inputs.fill(chunks, uses.sampled, samples, items)
        self._inputs.send()
        self.last_key = key
        self.graphs.run(key)
        return self.device_logits(len(uses.sampled))

    def _send_parts(self, chunks: Sequence[Chunk], lengths: Sequence[int], uses: RowUses) -> bool:
        """Send the extras of all rows, and those of the sampled ones."""
        of_rows = [chunk.selection for chunk in chunks], lengths
        return self._send_extras([of_rows, (uses.selections, [1] * len(uses.sampled))])

    def _has_room(self, size: int, items: Sequence[Tensor]) -> bool:
        most = self._num_items[size] * len(self._windows)
        return all(len(some) <= limit for some, limit in zip(items, most, strict=True))

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
        kinds = len(self._num_items[self._sizes[-1]])
        items = {
            window: inputs.items[place * kinds : (place + 1) * kinds]
            for place, window in enumerate(self._windows)
        }
        return self._kernels.attention.plan_steps(
            self._page_table, inputs.slots, self._q, self._decoder.layout, items
        )

    def _compute(self, num_rows: int, mode: LoraMode) -> None:
        inputs = self._inputs
        num_logits = min(num_rows, self._logits.shape[0])
        inputs.pages.write_table(self._page_table)
        plan = self._plan.first_rows(num_rows, self._num_items[num_rows])
        lora = self.lora.begin(mode, num_rows)
        of_rows = of_logits = None
        if mode.extras:
            of_rows, of_logits = (inputs.step(mode.extras) for inputs in self._extras)
        token_ids, positions = inputs.token_ids(num_rows), inputs.positions[:num_rows]
        hidden = self._decoder.hidden(token_ids, positions, plan, lora, of_rows)
        logits = self._logits[:num_logits]
        sampled = inputs.sampled_rows[:num_logits]
        self._decoder.write_logits(hidden.index_select(0, sampled), logits, of_logits)
        self._token_buffer.store(self.device_logits(num_logits).choose(self._kernels.sampling))
