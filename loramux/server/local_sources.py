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
from loramux.sources.source_id import SourceId, SourceKind


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

    Remote and local files are copied, so that no link can take their place later: call it on a
    thread.
    """
    if is_remote(source):
        found = parse_source(source, config)
    else:
        root, folder = find_under_roots(Path(source), [Path(one) for one in roots])
        parts = folder.relative_to(root).parts
        found = SourceId(kind=SourceKind.LOCAL, place=str(root), folder=parts)
    with fetched(Fetcher(config), found, area, progress=progress) as copies:
        yield copies
