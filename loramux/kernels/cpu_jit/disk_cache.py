"""Invalidates numba's disk cache when any file of a folder changes.

Numba only checks whether a function's own file has changed. Functions of other files are compiled
into it, so that a new version of loramux would run parts of the old one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import caching

PATTERN = "*.py"


def can_cache(folder: Path) -> bool:
    """Whether the folder's compiled code can be cached on disk, with one stamp for all files."""
    try:
        keep_together(folder)
        njit(cache=True)(lambda: None)
    except (AttributeError, RuntimeError):  # Another cache in this numba; no writable folder.
        return False
    return True


def keep_together(folder: Path) -> None:
    """Make cache entries of a folder's files valid only while none of the files has changed."""
    known = caching.CacheImpl._locator_classes
    stamp = stamp_of(folder)
    # Numba takes the first locator that accepts a function's file; other folders are unaffected.
    own = [_for_folder(locator, folder.resolve(), stamp) for locator in known]
    caching.CacheImpl._locator_classes = [*own, *known]


def stamp_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob(PATTERN)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _for_folder(locator: Any, folder: Path, stamp: str) -> Any:
    """Return the locator, with the folder's stamp, for the files of one folder."""

    class FolderLocator(locator):  # type: ignore[misc]
        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            if Path(py_file).resolve().parent != folder:
                return None
            return super().from_function(py_func, py_file)

        def get_source_stamp(self) -> Any:
            return stamp

    return FolderLocator
