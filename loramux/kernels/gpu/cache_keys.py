"""Makes the keys of Triton's disk cache independent of the order in which kernels are launched.

Triton 3.6 hashes the global constants of a function's callees only if the keys of the callees were
computed before its own. Without a fixed order, kernels compiled by one process are not found by
another.
"""

from __future__ import annotations

import importlib
import pkgutil

from triton.runtime.jit import JITFunction

from loramux.kernels import gpu


def compute_cache_keys() -> None:
    """Compute the keys of all kernels in a fixed order, before any of them is launched."""
    for name in sorted(m.name for m in pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}.")):
        module = importlib.import_module(name)
        functions = {k: f for k, f in vars(module).items() if isinstance(f, JITFunction)}
        for _, function in sorted(functions.items()):
            # The property computes the key and keeps it.
            _ = function.cache_key
