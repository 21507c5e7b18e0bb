"""Stacks the weights of the batch's adapters, so that one batched GEMM serves them all (CPU).

Adapters of one layout share a stack. Kernels that read addresses read an adapter with contiguous
pages in place; others are copied from their pages into the stack when they join the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loramux.adapters.packed.dense import DenseLayout
from loramux.kernels.ops import LoraSlice, LoraWeights
from loramux.memory.device import zeros
from loramux.memory.pool import PageView
from loramux.memory.records import ResidentAdapter

# A stack reserves address space only: a slot takes memory when an adapter is first copied into it.
# The kernel zeroes that memory then, which takes longer than the copy, so a stack should rarely be
# made again for a larger batch.
_RESERVED_TIMES = 8
_RESERVED_BYTES = 1 << 30

LayoutKey = tuple[tuple[int, str, tuple[int, ...]], ...]
SiteKey = tuple[int, str]


@dataclass(slots=True)
class Stack:
    """Row i of storage holds the low-rank pages of adapter slots[i], if it was copied."""

    layout: DenseLayout
    num_pages: int
    storage: Tensor
    addresses: NDArray[np.int64]
    """Address of the adapter of each slot."""
    slots: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    """CID stored in each row of `storage`, or stale."""
    weights: dict[SiteKey, LoraWeights] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        return self.storage.shape[0]


class LoraStacks:
    """Keeps the stacks of the latest batch and updates them for the next."""

    def __init__(self, pages: PageView, *, in_place: bool) -> None:
        """in_place: the kernels read addresses."""
        self._pages = pages
        self._in_place = in_place
        self._stacks: dict[LayoutKey, Stack] = {}
        self._cids: list[str] = []
        """CIDs of the previous step, which often had the same adapters."""
        self._groups: dict[LayoutKey, list[int]] = {}
        """Indices into that list, by layout."""

    @property
    def num_bytes(self) -> int:
        return sum(s.storage.numel() * s.storage.element_size() for s in self._stacks.values())

    def place(self, adapters: Sequence[ResidentAdapter]) -> list[Stack]:
        """Return stacks whose slots hold these adapters, one stack per layout.

        They are in the order of their layouts, whatever the batch: kernels add the adapters of a
        row stack after stack, and the rounding of a sum depends on the order.
        """
        cids = [adapter.cid for adapter in adapters]
        if cids != self._cids:
            self._cids, self._groups = cids, _by_layout(adapters)
            # Stacks that no row uses are dropped; the pages still hold their adapters.
            for key in self._stacks.keys() - self._groups.keys():
                del self._stacks[key]
        return [
            self._fill(key, [adapters[number] for number in numbers])
            for key, numbers in self._groups.items()
        ]

    def _fill(self, key: LayoutKey, members: list[ResidentAdapter]) -> Stack:
        stack = self._stacks.get(key)
        if stack is None or stack.capacity < len(members):
            stack = self._stacks[key] = self._make(members[0], count=len(members))
        self._copy_missing(stack, members)
        return stack

    def _copy_missing(self, stack: Stack, members: list[ResidentAdapter]) -> None:
        """Assign slots: adapters keep theirs, new ones take slots that are not wanted."""
        if not self._in_place:
            del stack.slots[len(members) :]
        wanted = {member.cid for member in members}
        free = [slot for slot, cid in enumerate(stack.slots) if cid not in wanted]
        free += range(len(stack.slots), len(stack.slots) + len(members))
        held = {cid: slot for slot, cid in enumerate(stack.slots)}
        for member in members:
            slot = held.get(member.cid)
            if slot is None:
                slot = free.pop(0)
                _set(stack.slots, slot, member.cid)
            self._provide(stack, slot, member)

    def _provide(self, stack: Stack, slot: int, member: ResidentAdapter) -> None:
        """Set the slot's address to the adapter, copying it if it cannot be read in place."""
        if self._in_place and member.is_contiguous:
            stack.addresses[slot] = self._pages.address(member.page_ids[0])
            return
        row = stack.storage[slot]
        stack.addresses[slot] = row.data_ptr()
        if slot >= len(stack.copied) or stack.copied[slot] != member.cid:
            self._pages.read(member.page_ids[: stack.num_pages], row)
            _set(stack.copied, slot, member.cid)

    def _make(self, first: ResidentAdapter, *, count: int) -> Stack:
        num_pages = self._pages.pages_for(first.stacked.low_rank_elements)
        width = num_pages * self._pages.width
        like = self._pages.storage
        capacity = _with_room(count)
        if like.device.type == "cpu":
            num_reserved = _RESERVED_BYTES // (width * like.element_size())
            capacity = max(capacity, min(_RESERVED_TIMES * count, num_reserved))
        storage = zeros((capacity, width), dtype=like.dtype, device=like.device)
        addresses = np.zeros(capacity, dtype=np.int64)
        stack = Stack(first.stacked, num_pages, storage, addresses)
        stack.weights = {site: _views(stack, site) for site in first.stacked.places}
        return stack


def _by_layout(adapters: Sequence[ResidentAdapter]) -> dict[LayoutKey, list[int]]:
    groups: dict[LayoutKey, list[int]] = {}
    for number, adapter in enumerate(adapters):
        groups.setdefault(adapter.stacked.key, []).append(number)
    return dict(sorted(groups.items())) if len(groups) > 1 else groups


def _views(stack: Stack, site: SiteKey) -> LoraWeights:
    place = stack.layout.places[site]
    stride = stack.storage.stride(0)

    def view(offset: int, rows: int, columns: int) -> Tensor:
        shape, strides = (stack.capacity, rows, columns), (stride, columns, 1)
        return stack.storage.as_strided(shape, strides, offset)

    pieces = [(piece, view(piece.offset, piece.rank, piece.out_features)) for piece in place.slices]
    slices = tuple(
        LoraSlice(b=b, rank_start=piece.rank_start, out_start=piece.out_start)
        for piece, b in pieces
    )
    a = view(place.a_offset, place.in_features, place.total_rank)
    return LoraWeights(a=a, slices=slices, addresses=stack.addresses)


def _set(names: list[str], index: int, name: str) -> None:
    names += [""] * (index + 1 - len(names))
    names[index] = name


def _with_room(count: int) -> int:
    """Capacity with some spare slots, so that a few more may join without a new stack."""
    return count + min(count - 1, max(2, count // 4))
