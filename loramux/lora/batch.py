"""Maps the rows of a step to adapters, for every site of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from loramux.kernels.ops import LoraKernels, LoraRows, LoraWeights, Segment
from loramux.lora.stacks import LoraStacks, SiteKey, Stack
from loramux.memory.records import ResidentAdapter
from loramux.types.request import Selection

_NO_STACK = -1


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows start .. stop of one sequence, with its selection."""

    selection: Selection
    start: int
    stop: int


class LoraBatch:
    """The step's adapters in stacks; sorting by `order` makes rows of one adapter adjacent."""

    def __init__(self, stacks: Sequence[Stack], others: Sequence[str] = ()) -> None:
        """`others`: the CIDs of adapters without low rank, which are in no stack."""
        self._stacks = stacks
        self._slots = {cid: (_NO_STACK, slot) for slot, cid in enumerate(others)}
        self._slots |= {
            cid: (number, slot)
            for number, stack in enumerate(stacks)
            for slot, cid in enumerate(stack.slots)
        }
        self._runs: Sequence[RowRun] = ()
        self.sites: dict[SiteKey, list[tuple[LoraWeights, LoraRows]]] = {}

    def order(self, selection: Selection) -> tuple[bool, tuple[tuple[int, int, float], ...]]:
        """Sort key that makes sequences of one selection adjacent: by stacks and slots; base last.

        The rows of a sum of adapters follow those of its first adapter.
        """
        return not selection, tuple((*self._slots[cid], weight) for cid, weight in selection)

    def set_rows(self, runs: Sequence[RowRun], kernels: LoraKernels) -> None:
        """Set the rows of every site."""
        self._runs = runs
        for stack, rows in self._cut(runs, kernels):
            for site, weights in stack.weights.items():
                self.sites.setdefault(site, []).append((weights, rows))

    def keep_rows(
        self, rows: Sequence[int], sites: Iterable[SiteKey], kernels: LoraKernels
    ) -> None:
        """Limits these sites to the given rows, which are renumbered 0, 1, .. there."""
        selections = {
            row: run.selection for run in self._runs for row in range(run.start, run.stop)
        }
        kept: list[RowRun] = []
        for selection, members in groupby(selections[row] for row in rows):
            start = kept[-1].stop if kept else 0
            kept.append(RowRun(selection, start, start + len(list(members))))
        cut = self._cut(kept, kernels)
        for site in sites:
            self.sites[site] = [
                (stack.weights[site], stack_rows)
                for stack, stack_rows in cut
                if site in stack.weights
            ]

    def _cut(self, runs: Sequence[RowRun], kernels: LoraKernels) -> list[tuple[Stack, LoraRows]]:
        """Cuts the runs into segments of each stack; stacks that no run uses are left out.

        The segments of a row are in the order of its selection.
        """
        segments: list[list[Segment]] = [[] for _ in self._stacks]
        for selection, members in groupby(runs, key=attrgetter("selection")):
            first, *others = members
            stop = others[-1].stop if others else first.stop
            for cid, weight in selection:
                number, slot = self._slots[cid]
                if number == _NO_STACK:
                    continue
                _extend(segments[number], Segment(slot, first.start, stop, weight))
        return [
            (stack, kernels.cut_rows(stack_segments, len(stack.slots)))
            for stack, stack_segments in zip(self._stacks, segments, strict=True)
            if stack_segments
        ]


def _extend(segments: list[Segment], new: Segment) -> None:
    """Append a segment, or extend the last one if it is adjacent and has the same adapter."""
    last = segments[-1] if segments else None
    if last is not None and (last.slot, last.stop, last.weight) == (
        new.slot,
        new.start,
        new.weight,
    ):
        segments[-1] = Segment(last.slot, last.start, new.stop, last.weight)
    else:
        segments.append(new)


def gather_batch(
    selections: Sequence[Selection], adapters: Mapping[str, ResidentAdapter], stacks: LoraStacks
) -> LoraBatch | None:
    """Places the step's adapters in stacks; None: no sequence has an adapter."""
    cids = dict.fromkeys(cid for selection in selections for cid, _ in selection)
    if not cids:
        return None
    placed = [adapters[cid] for cid in cids if adapters[cid].stacked.places]
    others = [cid for cid in cids if not adapters[cid].stacked.places]
    return LoraBatch(stacks.place(placed), others)
