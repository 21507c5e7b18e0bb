"""Which adapters have their A in the tails of the base weights, and how they get there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from loramux.kernels.gpu.lora.work_list import Ints
from loramux.kernels.gpu.lora_augmented.tables import TailStore
from loramux.lora.segmented import DeviceDirectory

# Steps that an adapter must have been asked for in a row before it is copied: a copy costs less
# than one step gains, but a batch that changes with every step would copy for nothing.
_PATIENCE = 2


class AdapterTail:
    """Blocks of 16 ranks, the same in every tail; an adapter has as many as its largest chain.

    Whoever was used last goes last. Copies go to the stream of the steps, so their order is theirs.
    """

    def __init__(
        self,
        kernels: Any,
        store: TailStore,
        directory: DeviceDirectory,
        pool: Tensor,
        *,
        patience: int = _PATIENCE,
    ) -> None:
        self._kernels = kernels
        self._store = store
        self._directory = directory
        self._pool = pool
        self._patience = patience
        self._free = list(range(store.num_blocks))[::-1]
        # By slot, the one that was used last at the end.
        self._held: dict[int, tuple[int, ...]] = {}
        self._asked: dict[int, int] = {}
        self.blocks: Ints = np.zeros((directory.max_adapters, store.num_blocks), dtype=np.int32)
        """[slots, place in the chain]: where a group of ranks is."""
        self.num_copies = 0
        directory.on_remove.append(self.forget)

    @property
    def num_blocks(self) -> int:
        return self._store.num_blocks

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """slot -> its blocks, in the order of its chain."""
        return dict(self._held)

    def place(self, slots: Iterable[int], max_blocks: int | None = None) -> bool:
        """Are they all in the first max_blocks? What is asked for again and again is brought there.

        None: anywhere in the tail.
        """
        limit = self.num_blocks if max_blocks is None else max_blocks
        wanted = sorted(set(slots))
        missing = [slot for slot in wanted if not self._is_within(slot, limit)]
        self._asked = {slot: self._asked.get(slot, 0) + 1 for slot in missing}
        if self.num_needed(wanted) > limit:
            return False
        for slot in wanted:
            if slot in self._held:
                self._held[slot] = self._held.pop(slot)
        if any(count < self._patience for count in self._asked.values()):
            return False
        for slot in missing:
            self.forget(slot)
        for slot in missing:
            self._bring(slot, wanted, limit)
        return True

    def num_needed(self, slots: Iterable[int]) -> int:
        """Blocks that they have together, wherever they are."""
        return sum(map(self._num_blocks, slots))

    def is_within(self, slots: Iterable[int], max_blocks: int) -> bool:
        return all(self._is_within(slot, max_blocks) for slot in slots)

    def warm_up(self) -> None:
        """Compiles the copy, while there is nothing to copy: block 0 is cleared."""
        assert not self._held, "the tail is in use"
        self._copy(0, 0, 0)

    def forget(self, slot: int) -> None:
        self._free += self._held.pop(slot, ())
        self._asked.pop(slot, None)

    def check_integrity(self) -> None:
        taken = [block for blocks in self._held.values() for block in blocks]
        assert sorted(taken + self._free) == list(range(self._store.num_blocks))

    def _num_blocks(self, slot: int) -> int:
        return int(self._directory.groups.num_chained[slot])

    def _is_within(self, slot: int, limit: int) -> bool:
        return slot in self._held and all(block < limit for block in self._held[slot])

    def _bring(self, slot: int, wanted: Iterable[int], limit: int) -> None:
        needed = self._num_blocks(slot)
        while sum(block < limit for block in self._free) < needed:
            self.forget(
                next(
                    other
                    for other, blocks in self._held.items()
                    if other not in wanted and any(block < limit for block in blocks)
                )
            )
        self._free.sort(reverse=True)
        blocks = tuple(self._free.pop() for _ in range(needed))
        for chain, block in enumerate(blocks):
            self._copy(slot, chain, block)
        self.blocks[slot, :needed] = blocks
        self._held[slot] = blocks
        self._asked.pop(slot, None)
        self.num_copies += 1

    def _copy(self, slot: int, chain: int, block: int) -> None:
        directory = self._directory
        self._kernels.copy_block(
            self._store,
            self._pool,
            directory.addresses,
            directory.slots,
            group=(slot, chain),
            block=block,
        )
