"""Cache of adapters whose A rows are appended to the base weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from loramux.kernels.gpu.lora.work_list import Ints
from loramux.kernels.gpu.lora_augmented.tables import AugmentedWeights
from loramux.kernels.ops import AugmentedLoraOps
from loramux.lora.segmented import DeviceDirectory

# Consecutive steps that must need an adapter before its A is copied. One copy costs less than one
# step gains, but a batch that changes with every step would copy in vain.
_COPY_AFTER_STEPS = 2


class AugmentedCache:
    """LRU cache over the rank blocks of augmented weights, the same blocks in every weight.

    An adapter takes as many blocks as its largest projection needs. Copies are enqueued on the
    stream of the steps, so that their order is the order of the calls.
    """

    def __init__(
        self,
        kernels: AugmentedLoraOps,
        weights: AugmentedWeights,
        directory: DeviceDirectory,
        pool: Tensor,
        *,
        copy_after: int = _COPY_AFTER_STEPS,
    ) -> None:
        self._kernels = kernels
        self._weights = weights
        self._directory = directory
        self._pool = pool
        self.copy_after = copy_after
        """Consecutive steps that must need an adapter before it is copied."""
        self._free = list(range(weights.num_blocks))[::-1]
        # Blocks by slot, the most recently used slot last.
        self._held: dict[int, tuple[int, ...]] = {}
        self._num_misses: dict[int, int] = {}
        self.blocks: Ints = np.zeros((directory.max_adapters, weights.num_blocks), dtype=np.int32)
        """[slots, rank block of the adapter] -> block of the augmented weights."""
        self.num_copies = 0

    @property
    def num_blocks(self) -> int:
        return self._weights.num_blocks

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """Blocks of each cached slot, in the order of the adapter's rank blocks."""
        return dict(self._held)

    def place(self, slots: Iterable[int], max_blocks: int | None = None) -> bool:
        """Whether all slots are in the first max_blocks blocks (None: in any) after this call.

        Copies missing adapters once enough consecutive calls have asked for them.
        """
        limit = self.num_blocks if max_blocks is None else max_blocks
        wanted = sorted(set(slots))
        missing = [slot for slot in wanted if not self._is_within(slot, limit)]
        self._num_misses = {slot: self._num_misses.get(slot, 0) + 1 for slot in missing}
        if self.num_needed(wanted) > limit:
            return False
        for slot in wanted:
            if slot in self._held:
                self._held[slot] = self._held.pop(slot)
        if any(count < self.copy_after for count in self._num_misses.values()):
            return False
        for slot in missing:
            self.forget(slot)
        for slot in missing:
            self._insert(slot, wanted, limit)
        return True

    def num_needed(self, slots: Iterable[int]) -> int:
        """Return the number of blocks that these adapters take together."""
        return sum(map(self._num_blocks, slots))

    def is_within(self, slots: Iterable[int], max_blocks: int) -> bool:
        return all(self._is_within(slot, max_blocks) for slot in slots)

    def warm_up(self) -> None:
        """Compiles the copy kernel by clearing block 0; the cache must be empty."""
        assert not self._held, "the augmented weights are in use"
        self._copy(0, 0, 0)

    def forget(self, slot: int) -> None:
        self._free += self._held.pop(slot, ())
        self._num_misses.pop(slot, None)

    def check_integrity(self) -> None:
        taken = [block for blocks in self._held.values() for block in blocks]
        assert sorted(taken + self._free) == list(range(self._weights.num_blocks))

    def _num_blocks(self, slot: int) -> int:
        return int(self._directory.blocks.num_blocks[slot])

    def _is_within(self, slot: int, limit: int) -> bool:
        return slot in self._held and all(block < limit for block in self._held[slot])

    def _insert(self, slot: int, wanted: Iterable[int], limit: int) -> None:
        """Copy an adapter into free blocks below limit, evicting the least recently used."""
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
        for index, block in enumerate(blocks):
            self._copy(slot, index, block)
        self.blocks[slot, :needed] = blocks
        self._held[slot] = blocks
        self._num_misses.pop(slot, None)
        self.num_copies += 1

    def _copy(self, slot: int, index: int, block: int) -> None:
        directory = self._directory
        self._kernels.copy_block(
            self._weights,
            self._pool,
            directory.addresses,
            directory.slots,
            rank_block=(slot, index),
            block=block,
        )
