"""What the layers of a step call for the parts of its adapters beside low rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loramux.kernels.gpu.extras.tables import (
    ATTENTION_NORM,
    MLP_NORM,
    ExtrasLimits,
    ExtrasTables,
    Ints,
    LayerNumbers,
    ReplacedOutputs,
    build_extras_list,
)
from loramux.kernels.gpu.transfer import send
from loramux.kernels.ops import ExtrasOps
from loramux.lora.device_extras import DeviceExtras, ExtrasUse
from loramux.types.model import LinearSpec
from loramux.types.request import Selection

DECODE_TILE_ROWS = 16
PREFILL_TILE_ROWS = 64
# Adapters of a sum, before steps run without a graph.
_ENTRIES_PER_SEQUENCE = 4


def graph_limits(max_rows: int, max_sequences: int, tile_rows: int) -> ExtrasLimits:
    """Return the limits of the steps of a graph."""
    most = _ENTRIES_PER_SEQUENCE * max_sequences
    return ExtrasLimits(
        max_rows=max_rows,
        max_entries=most,
        max_tiles=max_rows // tile_rows + most,
        max_h_rows=_ENTRIES_PER_SEQUENCE * max_rows,
        tile_rows=tile_rows,
    )


@dataclass(frozen=True, slots=True)
class ExtrasStep:
    """The rows of one step, or those of its logits, with the parts that their adapters have."""

    kernels: ExtrasOps
    tables: ExtrasTables
    uses: ExtrasUse
    sites: tuple[LinearSpec, ...]
    numbers: LayerNumbers

    def change_linear(
        self, y: Tensor, x: Tensor, bias: Tensor | None, layer: int, site: int
    ) -> None:
        """Apply weights, gains and biases to the output of a fused linear, before its low rank.

        `bias` is the base's.
        """
        if ExtrasUse.WEIGHTS in self.uses:
            spec = self.sites[site]
            first = self.numbers.matrix(layer, spec.projections[0])
            linear = ReplacedOutputs(first, spec.out_features, bias)
            self.kernels.replace_outputs(self.tables, y, x, linear)
        if ExtrasUse.LINEARS in self.uses:
            number = self.numbers.vector_of[self.sites[site].name]
            self.kernels.scale_add(self.tables, y, self.numbers.vector(layer, number))

    def change_attention_norm(self, normed: Tensor, layer: int) -> None:
        """Return the step of a layer; the one after the last layer is the final norm."""
        self._change_norm(normed, self.numbers.vector(layer, ATTENTION_NORM))

    def change_mlp_norm(self, normed: Tensor, layer: int) -> None:
        self._change_norm(normed, self.numbers.vector(layer, MLP_NORM))

    def _change_norm(self, normed: Tensor, vector: int) -> None:
        if ExtrasUse.NORMS in self.uses:
            self.kernels.scale_add(self.tables, normed, vector)

    def change_embedding(self, residual: Tensor, token_ids: Tensor, scale: float) -> None:
        if ExtrasUse.EMBEDDING in self.uses:
            self.kernels.embed_rows(self.tables, residual, token_ids, scale)

    def change_logits(self, logits: Tensor, hidden: Tensor) -> None:
        """logits [rows, columns], before a softcap; columns beyond the base's hold -inf."""
        if ExtrasUse.HEAD in self.uses:
            self.kernels.replace_logits(self.tables, logits, hidden)
            self.kernels.scale_logits(self.tables, logits)
            self.kernels.add_low_rank_logits(self.tables, logits, hidden)


class ExtrasWork:
    """Makes the lists of steps."""

    def __init__(
        self,
        kernels: ExtrasOps,
        directory: DeviceExtras,
        sites: Sequence[LinearSpec],
        pool: Tensor,
        num_sms: int,
    ) -> None:
        self._kernels = kernels
        self.directory = directory
        self._sites = tuple(sites)
        self._pool = pool
        self._num_sms = num_sms

    def fill(
        self,
        selections: Sequence[Selection],
        lengths: Sequence[int],
        limits: ExtrasLimits,
        out: Ints,
    ) -> int:
        """Write the list of a step; return its number of words. Raises WorkListFull."""
        entries = [self.directory.entries(selection) for selection in selections]
        return build_extras_list(entries, lengths, limits, out)

    def step(self, words: Tensor, limits: ExtrasLimits, uses: ExtrasUse) -> ExtrasStep:
        """Return a step whose list is, or will be, in `words`."""
        directory = self.directory
        tables = ExtrasTables(
            pool=self._pool,
            vectors=directory.vectors,
            matrices=directory.matrices,
            heap=directory.heap,
            num_sms=self._num_sms,
            words=words,
            limits=limits,
        )
        return ExtrasStep(self._kernels, tables, uses, self._sites, directory.numbers)

    def step_now(
        self, selections: Sequence[Selection], lengths: Sequence[int]
    ) -> ExtrasStep | None:
        """Return a step with a list of its own; None: no adapter has extras."""
        uses = self.directory.uses(selections)
        if not uses:
            return None
        num_rows = sum(lengths)
        tile_rows = DECODE_TILE_ROWS if num_rows <= len(lengths) else PREFILL_TILE_ROWS
        num_entries = sum(len(selection) for selection in selections)
        longest = max(len(selection) for selection in selections)
        limits = replace(
            graph_limits(num_rows, len(selections), tile_rows),
            max_entries=num_entries,
            max_tiles=num_entries + longest * (num_rows // tile_rows),
            max_h_rows=longest * num_rows,
        )
        words = np.zeros(limits.num_words, dtype=np.int32)
        self.fill(selections, lengths, limits, words)
        return self.step(send(torch.from_numpy(words), self._pool.device), limits, uses)
