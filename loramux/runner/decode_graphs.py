"""CUDA graphs of decode steps, one for each batch size and LoRA mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.kernels.ops import DeviceAttentionPlan, DeviceKernels
from loramux.lora.extras_step import DECODE_TILE_ROWS, ExtrasWork, graph_limits
from loramux.lora.graph_lora import BASE_MODE, GraphLora, LoraMode
from loramux.runner.decode_inputs import DecodeInputs
from loramux.runner.extras_inputs import ExtrasInputs
from loramux.runner.gpu_decoder import GpuDecoder
from loramux.runner.gpu_sampler import DeviceLogits, SampleInputs
from loramux.runner.step_graphs import Key, StepGraphs
from loramux.runner.token_buffer import TokenBuffer
from loramux.types.request import Selection
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


def is_decode(chunk: Chunk) -> bool:
    return len(chunk.token_ids) == 1 and chunk.sample is not None and chunk.prompt_logprobs is None


class DecodeGraphs:
    """All graphs share inputs, tokens and logits, so that one of them runs at a time."""

    def __init__(
        self,
        decoder: GpuDecoder,
        kernels: DeviceKernels,
        lora: GraphLora,
        limits: DecodeLimits,
        device: torch.device,
        extras: ExtrasWork | None = None,
    ) -> None:
        """`extras`: of adapters with parts beside low rank; None: there are no such adapters."""
        self._decoder = decoder
        self._kernels = kernels
        self.lora = lora
        self._sizes = limits.batch_sizes
        most = self._sizes[-1]
        self._inputs = DecodeInputs(
            max_rows=most,
            max_sequences=limits.max_sequences,
            max_pages=limits.max_pages,
            num_lora_words=lora.num_words,
            device=device,
        )
        lora.segmented.read_from(self._inputs.lora_words[: lora.num_words])
        self._extras: ExtrasInputs | None = None
        if extras is not None:
            extras_limits = graph_limits(most, limits.max_sequences, DECODE_TILE_ROWS)
            self._extras = ExtrasInputs(extras, extras_limits, device)
        self._page_table = torch.zeros(most, limits.max_pages, dtype=torch.int32, device=device)
        self._logits = decoder.empty_logits(most)
        self._plans = {size: self._plan(size) for size in self._sizes}
        # Views of the first rows, by their number.
        self._logits_of: dict[int, DeviceLogits] = {}
        self._steps = StepGraphs(device, self._compute)
        self.last_mode = BASE_MODE
        """LoRA mode of the last step."""

    @property
    def keys(self) -> list[Key]:
        """All graphs to capture, the largest first: the others reuse its memory."""
        return [(size, mode) for size in reversed(self._sizes) for mode in self.lora.modes(size)]

    @property
    def largest(self) -> list[Key]:
        """The graphs of the largest size, which every step can run on."""
        return [(self._sizes[-1], mode) for mode in self.lora.modes(self._sizes[-1])]

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
            self._extras.send_padding()

    @property
    def token_buffer(self) -> TokenBuffer:
        """The tokens of the last step, on the device."""
        return self._inputs.token_buffer

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], samples: SampleInputs) -> DeviceLogits | None:
        """Launch a step and return the logits of each chunk in order; None if no graph fits.

        The kernel's samples are written to the token buffer. Chunks of one selection must be
        adjacent. Does not wait for the device.
        """
        if len(chunks) > self._sizes[-1]:
            return None
        self._inputs.begin()
        selections = [chunk.selection for chunk in chunks]
        key = self._choose(selections)
        if key is None or not self._fill_extras(key[1], selections):
            return None
        self._inputs.fill(chunks, samples.temperatures, samples.noise)
        self._inputs.send()
        self._steps.run(key)
        self.last_mode = key[1]
        return self._device_logits(len(chunks))

    def _fill_extras(self, mode: LoraMode, selections: Sequence[Selection]) -> bool:
        """Send the list of parts beside low rank, if the mode has any; False: it does not fit."""
        if not mode.extras:
            return True
        assert self._extras is not None, "adapters have no parts beside low rank"
        if not self._extras.fill(selections, [1] * len(selections)):
            return False
        self._extras.send()
        return True

    def _choose(self, selections: Sequence[Selection]) -> Key | None:
        """Write the LoRA work list; return the smallest graph that is captured.

        If none is, the smallest one; None if the work list does not fit, or the step runs without
        a graph until one for its mode is captured.
        """
        lengths = [1] * len(selections)
        smallest: Key | None = None
        for size in self._sizes:
            if size < len(selections):
                continue
            mode = self.lora.fill(selections, lengths, size, self._inputs.host_lora_words)
            if mode is None:
                return None
            if self._steps.is_ready((size, mode)):
                if smallest is not None:
                    self._steps.miss(smallest)
                return size, mode
            smallest = smallest or (size, mode)
        if smallest is not None and smallest[1].extras:
            self._steps.miss(smallest)
            return None
        if smallest is not None:
            self.lora.fill(selections, lengths, smallest[0], self._inputs.host_lora_words)
        return smallest

    def _plan(self, size: int) -> DeviceAttentionPlan:
        """Make the attention plan of a graph; its shape depends on the batch size alone."""
        layout = self._decoder.layout
        q = self._logits.new_empty(
            size, self._decoder.num_heads, layout.head_dim, dtype=self._decoder.dtype
        )
        return self._kernels.attention.plan_decodes(
            self._page_table[:size], layout, q, self._decoder.windows
        )

    def _compute(self, size: int, mode: LoraMode) -> None:
        """Compute a step without reading values from the device, so that it can be captured."""
        inputs, plan = self._inputs, self._plans[size]
        num_tokens = inputs.num_tokens[:size]
        inputs.pages.write_table(self._page_table[:size])
        plan.partition(num_tokens)
        lora = self.lora.begin(mode, size)
        extras = None if self._extras is None or not mode.extras else self._extras.step(mode.extras)
        hidden = self._decoder.hidden(inputs.token_ids(size), num_tokens - 1, plan, lora, extras)
        logits: Tensor = self._logits[:size]
        self._decoder.write_logits(hidden, logits, extras)
        self.token_buffer.store(self._device_logits(size).choose(self._kernels.sampling))

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
