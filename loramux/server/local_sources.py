"""Folders that a request may name, and how an adapter comes from elsewhere into one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loramux.sources.config import SourceConfig
from loramux.sources.environment import read_environment
from loramux.sources.fetch import Fetcher
from loramux.sources.local_paths import find_under_roots
from loramux.sources.parse import parse_source

REMOTE_PREFIXES = ("hf:", "s3://", "gs://", "az://", "http://", "https://")


def is_remote(source: str) -> bool:
    return source.startswith(REMOTE_PREFIXES)


def local_folder(source: str, roots: Sequence[str]) -> Path:
    """Raises SourceForbidden for what is outside the roots."""
    _, found = find_under_roots(Path(source), [Path(root) for root in roots])
    return found


@contextmanager
def fetched_folder(source: str, roots: Sequence[str]) -> Iterator[Path]:
    """The source's files for as long as the context lasts; downloads, so it is for threads."""
    if not is_remote(source):
        yield local_folder(source, roots)
        return
    config = read_environment(os.environ, SourceConfig(allowed_roots=tuple(map(Path, roots))))
    parsed = parse_source(source, config)
    with tempfile.TemporaryDirectory(prefix="loramux-fetch-") as folder:
        yield Fetcher(config).fetch(parsed, Path(folder) / "adapter").folder
