"""Fetched files that are wanted for a moment: what breaks off is gone on with next time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.sources.download import Progress
from loramux.sources.fetch import Fetcher
from loramux.sources.partial import is_still_at
from loramux.sources.source_id import SourceId

# What nobody came back for goes after this.
ABANDONED_S = 7 * 86_400.0
LOCK_NAME = "lock"


@contextmanager
def fetched(
    fetcher: Fetcher,
    source: SourceId,
    area: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Path]:
    """The source's files for as long as the context lasts."""
    area.mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep(area, older_than=time.time() - ABANDONED_S)
    with held(area / source.slug) as place, fetching(place, area) as folder:
        yield fetcher.fetch(source, folder / "adapter", progress=progress).folder


@contextmanager
def fetching(place: Path | None, area: Path) -> Iterator[Path]:
    if place is None:
        # Another fetches the same just now: this one cannot be gone on with later.
        with tempfile.TemporaryDirectory(prefix="once-", dir=area) as folder:
            yield Path(folder)
        return
    shutil.rmtree(place / "adapter", ignore_errors=True)
    yield place
    shutil.rmtree(place)


@contextmanager
def held(place: Path) -> Iterator[Path | None]:
    """The folder, for this process alone; None: another has it."""
    place.mkdir(mode=0o700, exist_ok=True)
    path = place / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield place if is_ours(descriptor, path) else None
    finally:
        os.close(descriptor)


def is_ours(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Its last holder may have removed it since it was opened.
    return is_still_at(descriptor, path)


def sweep(area: Path, *, older_than: float) -> None:
    for place in area.iterdir():
        try:
            is_old = place.stat().st_mtime < older_than
        except FileNotFoundError:
            continue
        if is_old:
            with held(place) as free:
                if free is not None:
                    shutil.rmtree(free)
