"""Environment variables that the CLI and the engine worker set before torch is loaded.

OpenMP and mimalloc read them once, when torch is imported. Threads that spin while they wait take
cores from threads that compute: with three processes on two cores each computed 21 GEMMs per
second spinning, 54 with the defaults, and 69 with passive waiting. Tensors of consecutive steps
have the same sizes, so mimalloc should not return their memory to the system between steps: the
kernel would zero every page again.
"""

from __future__ import annotations

import os

DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "MIMALLOC_PURGE_DELAY": "1000",
}


def set_process_environment() -> None:
    """Set the variables of this process that the user has not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def child_environment() -> dict[str, str]:
    """Return the environment for a child process: this one's, with defaults for what is not set."""
    return {**DEFAULTS, **os.environ}
