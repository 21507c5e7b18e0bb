"""Persists the use counts of adapters, so that a restarted server can prewarm the busiest."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from loramux.base.private_files import make_private_folder, private_opener

_FILE = "usage.json"
# Factor on the counts of earlier runs when a new run is added.
_DECAY = 0.5


class UsageFile:
    """The file of use counts in the folder of the disk tier."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._before = _read(self._path)

    def busiest(self, known: Iterable[str], count: int) -> list[str]:
        """Return the most used of the known CIDs in earlier runs, at most `count`."""
        used = [cid for cid in known if self._before.get(cid, 0) > 0]
        return sorted(used, key=lambda cid: -self._before[cid])[:count]

    def save(self, uses: Mapping[str, int]) -> None:
        """Write the decayed earlier counts plus this run's; errors of the disk are ignored."""
        counts = {cid: _DECAY * number for cid, number in self._before.items()}
        for cid, number in uses.items():
            counts[cid] = counts.get(cid, 0.0) + number
        counts = {cid: round(number, 3) for cid, number in counts.items() if number >= 0.01}
        partial = self._path.with_name(f".{_FILE}.{os.getpid()}")
        with contextlib.suppress(OSError):
            make_private_folder(self._path.parent)
            with open(partial, "w", opener=private_opener) as file:
                file.write(json.dumps(counts))
            partial.rename(self._path)


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
        return {str(cid): float(number) for cid, number in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
