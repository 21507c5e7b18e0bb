"""Compiles the numba kernels once, so that parallel test processes find them in the cache.

Without this step each process compiles all of them, and the cache mixes functions of several runs.
"""

from __future__ import annotations

from loramux.kernels.compile_ahead import compile_all, has_numba

if __name__ == "__main__" and has_numba():
    compile_all()
