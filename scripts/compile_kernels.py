"""Compiles the numba kernels once, so that parallel test processes find them in the cache.

Without this step each process compiles all of them, and the cache mixes functions of several runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import loramux.kernels.cpu_jit as package


def main() -> None:
    if importlib.util.find_spec("numba") is None:
        return
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


if __name__ == "__main__":
    main()
