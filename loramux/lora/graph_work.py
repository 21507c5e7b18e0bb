"""How the adapters of a graph's step are added: from the tail, by a list, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from loramux.kernels.lora_work import WorkListFull
from loramux.lora.device_work import Ints, LoraWork
from loramux.lora.tail_work import TailStep, TailWork
from loramux.types import Selection


class LoraKind(Enum):
    TAIL = auto()
    LISTS = auto()
    NONE = auto()


class GraphLora:
    """The two ways share a place for their work: a step goes one of them."""

    def __init__(self, lists: LoraWork, tail: TailWork | None) -> None:
        self.lists = lists
        self.tail = tail

    @property
    def kinds(self) -> list[LoraKind]:
        return [kind for kind in LoraKind if kind is not LoraKind.TAIL or self.tail is not None]

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
        if self.tail is not None and self.tail.fill(selections, lengths, num_rows, out):
            return LoraKind.TAIL
        try:
            self.lists.fill(selections, lengths, out)
        except WorkListFull:
            return None
        return LoraKind.LISTS

    def begin(self, kind: LoraKind, num_rows: int) -> LoraWork | TailStep | None:
        """What a graph's layers call, after its first kernel: the work with its addresses."""
        work = {LoraKind.TAIL: self.tail, LoraKind.LISTS: self.lists}.get(kind)
        if work is None:
            return None
        step = work.for_decodes(num_rows)
        step.resolve()
        return step
