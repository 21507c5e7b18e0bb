"""Local folders and remote sources from which a request may load an adapter."""

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
    """Returns the real path of a local folder; raises SourceForbidden outside the roots."""
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
    """Provides a folder with the source's files while the context lasts.

    A remote source is downloaded: call it on a thread.
    """
    if not is_remote(source):
        yield local_folder(source, roots)
        return
    with fetched(Fetcher(config), parse_source(source, config), area, progress=progress) as folder:
        yield folder
