"""Compiled CPU kernels that are kept on disk are those of the sources that are there now.

Numba asks only whether a function's own file is still the same. What it calls in other files is
compiled into it, so that a new version of loramux would go on with parts of the old one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import caching

PATTERN = "*.py"


def can_cache(folder: Path) -> bool:
    """Is there a place for compiled code of the folder's files that only they can fill?"""
    try:
        keep_together(folder)
        njit(cache=True)(lambda: None)
    except (AttributeError, RuntimeError):  # This numba keeps it otherwise; no place to write to.
        return False
    return True


def keep_together(folder: Path) -> None:
    """From here on, what was compiled of a folder's files counts only while none has changed."""
    known = caching.CacheImpl._locator_classes
    stamp = stamp_of(folder)
    # Numba takes the first that knows a function's file: other folders' stay as they are.
    own = [_for_folder(locator, folder.resolve(), stamp) for locator in known]
    caching.CacheImpl._locator_classes = [*own, *known]


def stamp_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob(PATTERN)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _for_folder(locator: Any, folder: Path, stamp: str) -> Any:
    """The same place on disk, for the files of one folder."""

    class FolderLocator(locator):  # type: ignore[misc]
        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            if Path(py_file).resolve().parent != folder:
                return None
            return super().from_function(py_func, py_file)

        def get_source_stamp(self) -> Any:
            return stamp

    return FolderLocator
