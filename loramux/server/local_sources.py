"""Folders that a request may name, and how an adapter comes from elsewhere into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loramux.sources.config import SourceConfig
from loramux.sources.download import Progress
from loramux.sources.fetch import Fetcher, fetched
from loramux.sources.origins.local import find_under_roots
from loramux.sources.parse import is_remote, parse_source


def local_folder(source: str, roots: Sequence[str]) -> Path:
    """Raises SourceForbidden for what is outside the roots."""
    _, found = find_under_roots(Path(source), [Path(root) for root in roots])
    return found


@contextmanager
def fetched_folder(
    source: str,
    roots: Sequence[str],
    config: SourceConfig,
    area: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Path]:
    """The source's files for as long as the context lasts; downloads, so it is for threads."""
    if not is_remote(source):
        yield local_folder(source, roots)
        return
    with fetched(Fetcher(config), parse_source(source, config), area, progress=progress) as folder:
        yield folder
