"""Which tier has each adapter, as versioned moves that a reader may follow."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

# Moves that can be reported one by one; a reader further behind gets everything.
MAX_MOVES = 4096


class Tier(IntEnum):
    """Where an adapter's bytes are, from slow to fast."""

    GONE = 0
    SOURCE = 1
    DISK = 2
    HOST = 3
    LOADING = 4
    DEVICE = 5


def key_of_cid(cid: str) -> str:
    """Return the first 8 bytes of a CID's digest, in hexadecimal."""
    return cid.rpartition(":")[2][:16]


@dataclass(frozen=True, slots=True)
class Moves:
    """The newest tier of each adapter that moved after `since`, up to `generation`."""

    instance: str
    since: int
    generation: int
    is_full: bool
    """If true, `tiers` replaces everything that the reader knew."""
    tiers: Mapping[str, Tier]
    """By CID."""


class ResidencyView:
    """The tiers of one engine process, which readers follow by generation."""

    def __init__(self) -> None:
        self.instance = secrets.token_hex(8)
        """Another one for each engine process: its tiers and generations begin anew."""
        self.generation = 0
        self._tiers: dict[str, Tier] = {}
        self._resident: dict[str, None] = {}
        self._moves: deque[str] = deque(maxlen=MAX_MOVES)
        self.waiters: set[asyncio.Future[None]] = set()
        """Those of wait_for_move()."""

    @property
    def resident(self) -> Mapping[str, None]:
        """CIDs of the adapters on the device, in the order of their arrival."""
        return self._resident

    def tier_of(self, cid: str) -> Tier:
        """Return SOURCE for an adapter that no tier has."""
        return self._tiers.get(cid, Tier.SOURCE)

    def apply(self, moves: Iterable[tuple[str, int]], *, is_full: bool = False) -> None:
        changed = dict(moves)
        if is_full:
            changed = dict.fromkeys(self._tiers.keys() - changed.keys(), int(Tier.GONE)) | changed
        for cid, number in changed.items():
            self._move(cid, Tier(number))
        if changed:
            self.wake()

    def since(self, generation: int, instance: str) -> Moves:
        """Return what moved after a generation; everything if that is of another instance."""
        num_moves = self.generation - generation
        is_full = instance != self.instance or not 0 <= num_moves <= len(self._moves)
        tiers = dict(self._tiers)
        if not is_full:
            recent = islice(reversed(self._moves), num_moves)
            tiers = {cid: self._tiers.get(cid, Tier.GONE) for cid in recent}
        return Moves(self.instance, generation, self.generation, is_full, tiers)

    def wake(self) -> None:
        """End all waits, also without a move: the state of the engine has changed."""
        for woken in self.waiters:
            if not woken.done():
                woken.set_result(None)

    def _move(self, cid: str, tier: Tier) -> None:
        if tier is Tier.GONE:
            self._tiers.pop(cid, None)
        else:
            self._tiers[cid] = tier
        if tier is Tier.DEVICE:
            self._resident[cid] = None
        else:
            self._resident.pop(cid, None)
        self._moves.append(cid)
        self.generation += 1


async def wait_for_move(views: Iterable[ResidencyView], seconds: float) -> None:
    """Return after the next move or wake() of any view, or the timeout."""
    views = tuple(views)
    woken = asyncio.get_running_loop().create_future()
    for view in views:
        view.waiters.add(woken)
    try:
        await asyncio.wait((woken,), timeout=seconds)
    finally:
        for view in views:
            view.waiters.discard(woken)
