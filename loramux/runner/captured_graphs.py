"""What the CUDA graphs of all kinds of steps have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loramux.kernels.ops import DeviceKernels
from loramux.lora.graph_lora import GraphLora, LoraMode
from loramux.lora.segmented import Ints
from loramux.runner.extras_inputs import ExtrasInputs
from loramux.runner.gpu_decoder import GpuDecoder
from loramux.runner.gpu_sampler import DeviceLogits, SampleInputs
from loramux.runner.row_uses import RowUses
from loramux.runner.step_graphs import Key, StepGraphs
from loramux.types.request import Selection
from loramux.types.step import Chunk


class StepInputs(Protocol):
    """The host inputs of a step, at fixed addresses on the device."""

    temperatures: Tensor
    noise: Tensor
    lora_words: Tensor

    @property
    def host_lora_words(self) -> Ints: ...

    def begin(self) -> None: ...

    def fill_padding(self) -> None: ...

    def send(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a step: a graph, or kernel by kernel where no graph fits."""

    kind: str | None
    """Kind of the graph, decode or prefill; None: kernel by kernel."""
    key: Key | None
    """Rows and LoRA mode of the graph."""
    chunks: Sequence[Chunk]
    """In the order of their rows."""
    logits: Mapping[int, Tensor] = field(default_factory=dict)
    """By sequence id, of its first sampled row; the next step on a graph overwrites them."""


Inputs = TypeVar("Inputs", bound=StepInputs)


class CapturedGraphs(ABC, Generic[Inputs]):
    """The graphs of one kind of step, one for each size and LoRA mode.

    They share inputs, tokens and logits, so that one of them runs at a time.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        inputs: Inputs,
        decoder: GpuDecoder,
        kernels: DeviceKernels,
        lora: GraphLora,
        device: torch.device,
    ) -> None:
        """`sizes`: rows of the graphs, ascending."""
        self._sizes = sizes
        self._inputs = inputs
        self._decoder = decoder
        self._kernels = kernels
        self.lora = lora
        lora.segmented.read_from(inputs.lora_words[: lora.num_words])
        self._extras: tuple[ExtrasInputs, ...] = ()
        # Views of the first rows, by their number.
        self._logits_of: dict[int, DeviceLogits] = {}
        self.graphs = StepGraphs(device, self._compute)
        self.last_key: Key | None = None
        """The graph of the last launch."""

    kind: ClassVar[str]
    _logits: Tensor
    """[most sampled rows, vocab]"""

    @abstractmethod
    def _compute(self, num_rows: int, mode: LoraMode) -> None:
        """Compute a step without reading values from the device, so that it can be captured."""

    @abstractmethod
    def launch(
        self, chunks: Sequence[Chunk], uses: RowUses, samples: SampleInputs
    ) -> DeviceLogits | None:
        """Launch a step whose rows are read for sampling alone; return the logits of these rows.

        Return None if no graph fits. The kernel's samples are written to the token buffer. Chunks
        of one selection must be adjacent. Does not wait for the device.
        """

    @property
    def keys(self) -> list[Key]:
        """All graphs to capture, the largest first: the others reuse its memory."""
        return [(size, mode) for size in reversed(self._sizes) for mode in self.lora.modes(size)]

    @property
    def largest(self) -> list[Key]:
        """The graphs of the largest size, which every step with a graph can run on."""
        return [(self._sizes[-1], mode) for mode in self.lora.modes(self._sizes[-1])]

    def describe_launch(self, chunks: Sequence[Chunk]) -> Launch:
        """Describe the last launch, which was of these chunks."""
        logits: dict[int, Tensor] = {}
        for chunk, row in zip(RowUses.of(chunks).owners, self._logits, strict=False):
            logits.setdefault(chunk.sequence_id, row)
        return Launch(self.kind, self.last_key, chunks, logits)

    @torch.inference_mode()
    def capture(self, key: Key) -> None:
        """Capture a graph if it is new. Its first run is of padding rows, which write no keys."""
        if not self.graphs.is_ready(key):
            self._clear(key)
        self.graphs.get(key)

    @torch.inference_mode()
    def dry_run(self, key: Key) -> None:
        """Launch the kernels of a graph once, over padding rows, without capturing them."""
        self._clear(key)
        self._compute(*key)

    @property
    def first_logits(self) -> DeviceLogits:
        """The first row of logits."""
        return self.device_logits(1)

    def device_logits(self, num_rows: int) -> DeviceLogits:
        """Return the first rows of logits, with the inputs that sample them."""
        found = self._logits_of.get(num_rows)
        if found is None:
            inputs, rows = self._inputs, slice(num_rows)
            found = self._logits_of[num_rows] = DeviceLogits(
                self._logits[rows], inputs.temperatures[rows], inputs.noise[rows]
            )
        return found

    def _clear(self, key: Key) -> None:
        """Send the inputs of a step of padding rows alone."""
        num_rows, mode = key
        self._inputs.begin()
        self.lora.fill_padding(mode, num_rows, self._inputs.host_lora_words)
        self._inputs.fill_padding()
        self._inputs.send()
        if mode.extras:
            assert self._extras, "adapters have no parts beside low rank"
            for inputs in self._extras:
                inputs.send_padding()

    def _send_extras(self, lists: Iterable[tuple[Sequence[Selection], Sequence[int]]]) -> bool:
        """Send the selections and lengths for extras; False: they do not fit."""
        assert self._extras, "adapters have no parts beside low rank"
        for inputs, (selections, lengths) in zip(self._extras, lists, strict=True):
            if not inputs.fill(selections, lengths):
                return False
        for inputs in self._extras:
            inputs.send()
        return True

    def _choose(
        self,
        selections: Sequence[Selection],
        lengths: Sequence[int],
        num_rows: int,
        items: Sequence[Tensor] = (),
    ) -> Key | None:
        """Write the LoRA work list; return the smallest graph that is captured.

        If none is, the smallest one; None if the step does not fit into the smallest one, or runs
        without a graph until one for its mode is captured. `items`: attention work items.
        """
        words = self._inputs.host_lora_words
        smallest: Key | None = None
        for size in self._sizes:
            if size < num_rows:
                continue
            if items and not self._has_room(size, items):
                return None
            mode = self.lora.fill(selections, lengths, size, words)
            if mode is None:
                return None
            if self.graphs.is_ready((size, mode)):
                if smallest is not None:
                    self.graphs.miss(smallest)
                return size, mode
            smallest = smallest or (size, mode)
        if smallest is not None and smallest[1].extras:
            self.graphs.miss(smallest)
            return None
        if smallest is not None:
            self.lora.fill(selections, lengths, smallest[0], words)
        return smallest

    def _has_room(self, size: int, items: Sequence[Tensor]) -> bool:
        """Return whether a graph has room for the attention work items."""
        return True
