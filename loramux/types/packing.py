"""The code that packs adapters: the interface between the kernels and the adapter loader."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Fp12PackOps(Protocol):
    """Packs one rank block of bfloat16 weights, given as bits."""

    def pack_a(
        self,
        a: NDArray[np.uint16],
        words: NDArray[np.uint32],
        largest: NDArray[np.uint16],
        exponents: NDArray[np.int64],
    ) -> None:
        """Write a [ranks, in] to words [octets, 3, in], and its maxima and exponents [ranks]."""

    def pack_b(
        self,
        b: NDArray[np.uint16],
        scale: float,
        exponents: NDArray[np.int64],
        out: NDArray[np.uint16],
        largest: NDArray[np.uint16],
    ) -> None:
        """Write scale * 2^exponent * b [out, ranks] to out [ranks, out], and the maxima of b."""
