"""Chooses how the adapters of a graph's step are applied: augmented weights, SGMV, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from loramux.kernels.gpu.lora.work_list import WorkListFull
from loramux.lora.augmented_step import AugmentedStep, AugmentedWork
from loramux.lora.device_extras import ExtrasUse
from loramux.lora.segmented import Ints, SegmentedWork
from loramux.types.model import ATTENTION_BLOCK
from loramux.types.request import Selection


class LoraPath(Enum):
    NONE = auto()
    SEGMENTED = auto()
    """SGMV: a shrink and an expand kernel per fused linear, driven by the step's work list."""
    AUGMENTED = auto()
    """LoRA A is appended to the base weights: the base GEMM computes the shrink as well."""


@dataclass(frozen=True, slots=True)
class LoraMode:
    """What a captured graph computes for its adapters; part of the graph's key."""

    path: LoraPath
    num_blocks: int | None = None
    """Rank blocks of augmented weights that the GEMMs compute; None: all that the launch allows."""
    sites: tuple[str, ...] | None = None
    """Fused linears that have LoRA kernels; None: all."""
    extras: ExtrasUse = ExtrasUse.NONE
    """Extras that have kernels. Graphs with any are captured when steps need them,
    and their other adapters take the segmented path."""

    def __str__(self) -> str:
        parts = [self.path.name.lower()]
        parts += [] if self.num_blocks is None else [f"{self.num_blocks} blocks"]
        parts += [str(use.name).lower() for use in ExtrasUse if use in self.extras]
        return " ".join([*parts, *(self.sites or ())])


BASE_MODE = LoraMode(LoraPath.NONE)


class GraphLora:
    """Both paths write their work list to the same words: a step takes one of them."""

    def __init__(self, segmented: SegmentedWork, augmented: AugmentedWork | None) -> None:
        self.segmented = segmented
        self.augmented = augmented
        tables = segmented.tables
        specs = segmented.directory.sites
        self._attention = tuple(spec.name for spec in specs if spec.block == ATTENTION_BLOCK)
        others = [i for i, spec in enumerate(specs) if spec.block != ATTENTION_BLOCK]
        words = [word for site in others for word in tables.used_words(site)]
        self._mlp_words = np.array(words, dtype=np.intp)

    def modes(self, num_rows: int) -> list[LoraMode]:
        """All modes that a step of a graph of num_rows rows can have, in the order of capture."""
        partial = [self._attention] if self._mlp_words.size else []
        found: list[LoraMode] = []
        if self.augmented is not None:
            narrow = self.augmented.narrow_blocks(num_rows)
            found.append(LoraMode(LoraPath.AUGMENTED))
            found += [] if narrow is None else [LoraMode(LoraPath.AUGMENTED, num_blocks=narrow)]
            found += [LoraMode(LoraPath.AUGMENTED, sites=sites) for sites in partial]
        found.append(LoraMode(LoraPath.SEGMENTED))
        found += [LoraMode(LoraPath.SEGMENTED, sites=sites) for sites in partial]
        return [*found, BASE_MODE]

    @property
    def num_words(self) -> int:
        return self.segmented.tables.limits.num_words

    def fill(
        self, selections: Sequence[Selection], lengths: Sequence[int], num_rows: int, out: Ints
    ) -> LoraMode | None:
        """Write the work list of a graph of num_rows rows; None: no graph has room for the step.

        Selection i applies to the next lengths[i] rows; the remaining rows are padding.
        """
        if not any(selections):
            return BASE_MODE
        extras = self.segmented.directory.extras
        if extras is not None and (uses := extras.uses(selections)):
            return self._fill_with_extras(selections, lengths, uses, out)
        if self.augmented is not None:
            num_blocks = self.augmented.fill(selections, lengths, num_rows, out)
            if num_blocks is not None:
                if self._is_attention_only(out):
                    return LoraMode(LoraPath.AUGMENTED, sites=self._attention)
                is_narrow = num_blocks == self.augmented.narrow_blocks(num_rows)
                return LoraMode(LoraPath.AUGMENTED, num_blocks=num_blocks if is_narrow else None)
        try:
            self.segmented.fill(selections, lengths, out)
        except WorkListFull:
            return None
        sites = self._attention if self._is_attention_only(out) else None
        return LoraMode(LoraPath.SEGMENTED, sites=sites)

    def _fill_with_extras(
        self, selections: Sequence[Selection], lengths: Sequence[int], uses: ExtrasUse, out: Ints
    ) -> LoraMode | None:
        if ExtrasUse.WIDE in uses:
            return None
        try:
            self.segmented.fill(selections, lengths, out)
        except WorkListFull:
            return None
        return LoraMode(LoraPath.SEGMENTED, extras=uses)

    def fill_padding(self, mode: LoraMode, num_rows: int, out: Ints) -> None:
        """Write the work list of a step of padding rows alone, as a graph of this mode reads it.

        Kernels expect every row in the list: an empty one would leave them the rows of an earlier
        step, which may have had more of them.
        """
        if mode.path is LoraPath.AUGMENTED:
            assert self.augmented is not None, "the base weights are not augmented"
            num_blocks = self.augmented.fill([()], [num_rows], num_rows, out)
            assert num_blocks is not None, "padding needs no rank blocks"
        elif mode.path is LoraPath.SEGMENTED:
            self.segmented.fill([()], [num_rows], out)

    def begin(self, mode: LoraMode, num_rows: int) -> SegmentedWork | AugmentedStep | None:
        """Launch a graph's first LoRA kernel; return what its layers call (None: base only)."""
        if mode.path is LoraPath.NONE:
            return None
        work = self.segmented if mode.sites is None else self.segmented.at_sites(mode.sites)
        step: SegmentedWork | AugmentedStep = work
        if mode.path is LoraPath.AUGMENTED:
            assert self.augmented is not None, "the base weights are not augmented"
            step = self.augmented.over(work).step(num_rows, mode.num_blocks)
        step.resolve()
        return step

    def _is_attention_only(self, words: Ints) -> bool:
        """Whether the list's adapters change attention alone, and the model has other sites."""
        return self._mlp_words.size > 0 and not words.take(self._mlp_words).any()
