"""Logs which adapters moved between the tiers, for readers that follow them by version."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, TypeVar

from loramux.types.residency import MAX_MOVES

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class MovedAdapters:
    """CIDs that moved since an earlier version; None: the log does not reach back to it."""

    version: int
    cids: tuple[str, ...] | None


class MoveLog:
    """Counts moves and keeps the most recent ones; any thread may add to it."""

    def __init__(self) -> None:
        self.version = 0
        """Incremented by each move."""
        self.on_move: Callable[[], None] = lambda: None
        """Called after each move, on the thread that made it."""
        self._moves: deque[str] = deque(maxlen=MAX_MOVES)
        self._lock = threading.Lock()

    def add(self, cid: str) -> None:
        with self._lock:
            self._moves.append(cid)
            self.version += 1
        self.on_move()

    def since(self, version: int) -> MovedAdapters:
        with self._lock:
            num_moves = self.version - version
            if not 0 <= num_moves <= len(self._moves):
                return MovedAdapters(self.version, None)
            recent = dict.fromkeys(islice(reversed(self._moves), num_moves))
            return MovedAdapters(self.version, tuple(recent))


class TierTable(dict[str, Value]):
    """The contents of a tier by CID; each arrival and each departure is logged."""

    def __init__(self, moves: MoveLog) -> None:
        super().__init__()
        self._log = moves

    def __setitem__(self, cid: str, value: Value) -> None:
        is_new = cid not in self
        super().__setitem__(cid, value)
        if is_new:
            self._log.add(cid)

    def __delitem__(self, cid: str) -> None:
        super().__delitem__(cid)
        self._log.add(cid)

    def pop(self, cid: str, *default: Any) -> Any:
        was_there = cid in self
        value = super().pop(cid, *default)
        if was_there:
            self._log.add(cid)
        return value

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        raise TypeError("A tier changes by one adapter at a time.")

    update = setdefault = clear = popitem = __ior__ = _refuse
