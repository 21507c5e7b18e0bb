"""CUDA graphs of decode steps, one for each batch size and LoRA mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loramux.kernels.ops import DeviceAttentionPlan, DeviceKernels
from loramux.lora.extras_step import DECODE_TILE_ROWS, ExtrasWork, graph_limits
from loramux.lora.graph_lora import GraphLora, LoraMode
from loramux.runner.captured_graphs import CapturedGraphs
from loramux.runner.decode_inputs import DecodeInputs
from loramux.runner.extras_inputs import ExtrasInputs
from loramux.runner.gpu_decoder import GpuDecoder
from loramux.runner.gpu_sampler import DeviceLogits, SampleInputs
from loramux.runner.row_uses import RowUses
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.step import Chunk

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    max_sequences: int
    """Most sequences of a step; sizes above the last of BATCH_SIZES are not captured."""
    max_pages: int
    """Pages of the longest sequence."""

    @property
    def batch_sizes(self) -> list[int]:
        most = min(self.max_sequences, BATCH_SIZES[-1])
        return [size for size in BATCH_SIZES if size < most] + [most]


class DecodeGraphs(CapturedGraphs[DecodeInputs]):
    """The graphs of decode steps, by batch size."""

    kind = "decode"

    def __init__(
        self,
        decoder: GpuDecoder,
        kernels: DeviceKernels,
        lora: GraphLora,
        limits: DecodeLimits,
        device: torch.device,
        extras: ExtrasWork | None = None,
    ) -> None:
        """`extras`: of adapters with extras; None: there are no such adapters."""
        sizes = limits.batch_sizes
        most = sizes[-1]
        inputs = DecodeInputs(
            max_rows=most,
            max_sequences=limits.max_sequences,
            max_pages=limits.max_pages,
            num_lora_words=lora.num_words,
            device=device,
        )
        super().__init__(sizes, inputs, decoder, kernels, lora, device)
        if extras is not None:
            extras_limits = graph_limits(most, limits.max_sequences, DECODE_TILE_ROWS)
            self._extras = (ExtrasInputs(extras, extras_limits, device),)
        self._page_table = torch.zeros(most, limits.max_pages, dtype=torch.int32, device=device)
        self._logits = decoder.empty_logits(most)
        self._plans = {size: self._plan(size) for size in sizes}

    @property
    def token_buffer(self) -> TokenBuffer:
        """The tokens of the last step, on the device."""
        return self._inputs.token_buffer

    @torch.inference_mode()
    def launch(
        self, chunks: Sequence[Chunk], uses: RowUses, samples: SampleInputs
    ) -> DeviceLogits | None:
        is_decode = len(uses.sampled) == len(chunks) == sum(len(c.token_ids) for c in chunks)
        if not is_decode or len(chunks) > self._sizes[-1]:
            return None
        self._inputs.begin()
        selections, lengths = [chunk.selection for chunk in chunks], [1] * len(chunks)
        key = self._choose(selections, lengths, len(chunks))
        if key is None or (key[1].extras and not self._send_extras([(selections, lengths)])):
            return None
        self._inputs.fill(chunks, samples.temperatures, samples.noise)
        self._inputs.send()
        self.last_key = key
        self.graphs.run(key)
        return self.device_logits(len(chunks))

    def _plan(self, size: int) -> DeviceAttentionPlan:
        """Make the attention plan of a graph; its shape depends on the batch size alone."""
        layout = self._decoder.layout
        q = self._logits.new_empty(
            size, self._decoder.num_heads, layout.head_dim, dtype=self._decoder.attention_dtype
        )
        return self._kernels.attention.plan_decodes(
            self._page_table[:size], layout, q, self._decoder.windows
        )

    def _compute(self, num_rows: int, mode: LoraMode) -> None:
        inputs, plan = self._inputs, self._plans[num_rows]
        num_tokens = inputs.num_tokens[:num_rows]
        inputs.pages.write_table(self._page_table[:num_rows])
        plan.partition(num_tokens)
        lora = self.lora.begin(mode, num_rows)
        extras = self._extras[0].step(mode.extras) if mode.extras else None
        token_ids = inputs.token_ids(num_rows)
        hidden = self._decoder.hidden(token_ids, num_tokens - 1, plan, lora, extras)
        logits = self._logits[:num_rows]
        self._decoder.write_logits(hidden, logits, extras)
        self.token_buffer.store(self.device_logits(num_rows).choose(self._kernels.sampling))
