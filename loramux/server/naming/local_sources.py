"""Local folders and remote sources from which a request may load an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.errors import AdapterRefused
from loramux.sources.config import SourceConfig
from loramux.sources.download import Progress
from loramux.sources.fetch import Fetcher, fetched
from loramux.sources.origins.local import find_under_roots
from loramux.sources.parse import is_remote, parse_source
from loramux.sources.source_id import SourceId, SourceKind, split_weights


def local_folder(source: str, roots: Sequence[str]) -> Path:
    """Return the real path of a local folder; raise SourceForbidden outside the roots."""
    _, found = find_under_roots(Path(source), [Path(root) for root in roots])
    return found


def check_size(folder: Path, max_bytes: int) -> None:
    """Refuses an adapter whose weights are larger than the limit; others are left to its reader."""
    weights = folder if folder.is_file() else folder / WEIGHTS_NAME
    try:
        size = weights.stat().st_size
    except (OSError, ValueError):
        return
    if size > max_bytes:
        raise AdapterRefused(
            RefusalCode.TOO_LARGE,
            f"{weights.name} has {size} bytes; this server takes up to {max_bytes}.",
            fix="Save the adapter in a smaller dtype or rank, or raise --max-adapter-size.",
        )


@contextmanager
def fetched_folder(
    source: str,
    roots: Sequence[str],
    config: SourceConfig,
    area: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Path]:
    """Provide a folder with the source's files while the context lasts.

    Remote and local files are copied, so that no link can take their place later: call it on a
    thread.
    """
    if is_remote(source):
        found = parse_source(source, config)
    else:
        root, place = find_under_roots(Path(source), [Path(one) for one in roots])
        folder, weights_name = place.relative_to(root).parts, None
        if place.is_file():
            folder, weights_name = split_weights(folder)
        found = SourceId(
            kind=SourceKind.LOCAL, place=str(root), folder=folder, weights_name=weights_name
        )
    with fetched(Fetcher(config), found, area, progress=progress) as copies:
        yield copies
