"""Keeps the files of remote adapters on this machine, so that they are fetched once."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from loramux.base.private_files import explaining, make_private_folder
from loramux.errors import LoramuxError, SourceFailed
from loramux.sources.config import SourceConfig, scrub_error
from loramux.sources.download import Progress
from loramux.sources.fetch import Fetcher, open_origin
from loramux.sources.origins.base import find_adapter
from loramux.sources.parse import parse_source
from loramux.sources.retry import SYSTEM_TIMING, Deadline, retrying
from loramux.sources.source_id import SourceId

_log = logging.getLogger(__name__)
COMMIT = re.compile(r"[0-9a-f]{40}")
VERSION = re.compile(r"[0-9a-f]{32}")


class KeptAdapters:
    """A folder of fetched adapters, with a folder for each version of a source's files."""

    def __init__(self, config: SourceConfig, area: Path) -> None:
        self._config = config
        self._area = area

    def folder(self, text: str, *, progress: Callable[[Progress], None] | None = None) -> Path:
        """Return a folder with the source's files; raise the Source errors.

        They are fetched if they are not here or have changed at the source. If the source cannot
        be reached, the files that were used last are returned. A commit of the hub never changes,
        so that its files are not looked for again.
        """
        source = parse_source(text, self._config)
        place = self._area / source.slug
        kept = newest(place)
        if kept is not None and COMMIT.fullmatch(source.revision or ""):
            return kept
        try:
            folder = place / self._version(source)
            if not folder.is_dir():
                with explaining(place, "LORAMUX_CACHE or XDG_CACHE_HOME"):
                    make_private_folder(place)
                Fetcher(self._config).fetch(source, folder, progress=progress)
        except SourceFailed as error:
            if kept is None:
                raise
            _log.warning("%s The files that were fetched before are used.", error)
            return kept
        os.utime(folder)
        return folder

    def _version(self, source: SourceId) -> str:
        """Return a digest of what the origin says about the files; equal for equal files."""
        limits = self._config.limits
        deadline = Deadline(limits.timeout_s, SYSTEM_TIMING)
        try:
            with closing(open_origin(source, self._config, limits)) as origin:
                files = retrying(
                    lambda: find_adapter(source, origin), deadline, max_attempts=limits.max_attempts
                )
        except LoramuxError as error:
            scrub_error(error, self._config.secrets)
            raise
        facts = sorted((name, file.size_bytes, file.validator) for name, file in files.items())
        if any(file.validator is None for file in files.values()):
            # The origin cannot tell whether the files have changed: they are fetched every time.
            return os.urandom(16).hex()
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def newest(place: Path) -> Path | None:
    """Return the version that was used last."""
    if not place.is_dir():
        return None
    found = [path for path in place.iterdir() if VERSION.fullmatch(path.name)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
