"""Compiles what numba compiles, in one process, so that several at once find it in the cache.

Without it each of them compiles all of it, and the cache holds some functions of one and some of
another.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import loramux.kernels


def main() -> None:
    if importlib.util.find_spec("numba") is None:
        return
    folder = Path(loramux.kernels.__path__[0])
    for path in sorted(folder.glob("*_numba.py")):
        importlib.import_module(f"loramux.kernels.{path.stem}")


if __name__ == "__main__":
    main()
