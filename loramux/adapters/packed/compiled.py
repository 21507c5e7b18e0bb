"""The compiled packing code of this process, which the engine imports in the background."""

from __future__ import annotations

from loramux.types.packing import Fp12PackOps

_found: Fp12PackOps | None = None


def compiled_packer() -> Fp12PackOps | None:
    """Return the compiled code; None until it is imported, or if numba is not installed."""
    return _found


def use_packer(packer: Fp12PackOps | None) -> None:
    """Use compiled code from now on; None: numpy."""
    global _found
    _found = packer
