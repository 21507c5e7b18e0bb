"""How the adapters of a graph's step are added: from the tail, by a list, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from loramux.adapters.packed.dense import ATTENTION_SITES
from loramux.kernels.gpu.lora.work_list import WorkListFull
from loramux.lora.augmented_step import TailStep, TailWidth, TailWork
from loramux.lora.segmented import Ints, LoraWork
from loramux.types.request import Selection


class LoraKind(Enum):
    TAIL = auto()
    NARROW_TAIL = auto()
    """Only the first blocks of the tail are computed: the step's adapters are there."""
    TAIL_ATTENTION = auto()
    """From the tail, by adapters that change attention alone: other sites have no tail."""
    LISTS = auto()
    ATTENTION = auto()
    """Lists of adapters that change attention alone: nothing is launched at other sites."""
    NONE = auto()


class GraphLora:
    """Tail and lists share a place for their work: a step goes one of the two ways."""

    def __init__(self, lists: LoraWork, tail: TailWork | None) -> None:
        self.lists = lists
        self.tail = tail
        sites = lists.tables.sites
        self._attention = frozenset(
            i for i, cut in enumerate(sites) if cut.shape.name in ATTENTION_SITES
        )
        others = set(range(len(sites))) - self._attention
        words = [word for site in others for word in lists.tables.used_words(site)]
        self._other_words = np.array(words, dtype=np.intp)

    def kinds(self, num_rows: int) -> list[LoraKind]:
        """Those that a step of a graph of num_rows rows can be of."""
        has_tail, has_others = self.tail is not None, self._other_words.size > 0
        possible = {
            LoraKind.TAIL: has_tail,
            LoraKind.NARROW_TAIL: self.tail is not None and self.tail.has_narrow(num_rows),
            LoraKind.TAIL_ATTENTION: has_tail and has_others,
            LoraKind.ATTENTION: has_others,
        }
        return [kind for kind in LoraKind if possible.get(kind, True)]

    @property
    def num_words(self) -> int:
        return self.lists.tables.limits.num_words

    def fill(
        self, selections: Sequence[Selection], lengths: Sequence[int], num_rows: int, out: Ints
    ) -> LoraKind | None:
        """Writes the work of a graph of num_rows rows; None: it is more than a list holds.

        lengths[i]: rows of selections[i]; what is left is padding.
        """
        if not any(selections):
            return LoraKind.NONE
        width = None if self.tail is None else self.tail.fill(selections, lengths, num_rows, out)
        if width is not None:
            if self._is_attention(out):
                return LoraKind.TAIL_ATTENTION
            return LoraKind.TAIL if width is TailWidth.WHOLE else LoraKind.NARROW_TAIL
        try:
            self.lists.fill(selections, lengths, out)
        except WorkListFull:
            return None
        return LoraKind.ATTENTION if self._is_attention(out) else LoraKind.LISTS

    def begin(self, kind: LoraKind, num_rows: int) -> LoraWork | TailStep | None:
        """What a graph's layers call, after its first kernel: the work with its addresses."""
        ways: dict[LoraKind, LoraWork | TailWork | None] = {
            LoraKind.TAIL: self.tail,
            LoraKind.NARROW_TAIL: self.tail and self.tail.of_width(TailWidth.NARROW),
            LoraKind.TAIL_ATTENTION: self.tail and self.tail.at_sites(self._attention),
            LoraKind.LISTS: self.lists,
            LoraKind.ATTENTION: self.lists.at_sites(self._attention),
        }
        work = ways.get(kind)
        if work is None:
            return None
        step = work.for_decodes(num_rows) if isinstance(work, TailWork) else work
        step.resolve()
        return step

    def _is_attention(self, words: Ints) -> bool:
        """Do a list's adapters leave other sites alone, and are there any?"""
        return self._other_words.size > 0 and not words.take(self._other_words).any()
