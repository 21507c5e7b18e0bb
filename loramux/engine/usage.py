"""How often each adapter was used, kept over restarts, so that the busiest can be loaded first."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_FILE = "usage.json"
# Last run's counts weigh half of this run's.
_DECAY = 0.5


class UsageFile:
    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._before = _read(self._path)

    def busiest(self, known: Iterable[str], count: int) -> list[str]:
        """Of the known CIDs those that were used most, by what earlier runs have seen."""
        used = [cid for cid in known if self._before.get(cid, 0) > 0]
        return sorted(used, key=lambda cid: -self._before[cid])[:count]

    def save(self, uses: Mapping[str, int]) -> None:
        """Adds this run to what was known; a disk that refuses costs the warm start, no more."""
        counts = {cid: _DECAY * number for cid, number in self._before.items()}
        for cid, number in uses.items():
            counts[cid] = counts.get(cid, 0.0) + number
        counts = {cid: round(number, 3) for cid, number in counts.items() if number >= 0.01}
        partial = self._path.with_name(f".{_FILE}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(counts))
            partial.rename(self._path)


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
        return {str(cid): float(number) for cid, number in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
