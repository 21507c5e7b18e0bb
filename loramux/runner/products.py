"""Which library computes the products of a captured step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# On an H200, shapes of an 8B model: the four products of a layer take 120 us by cublasLt and 125
# by cublas at 32 rows, 121 and 128 at 64, 127 and 135 at 96; beyond and below there is nothing in
# it, or the other is faster.
_LT_ROWS = range(24, 97)


@contextmanager
def fastest_products(
    num_rows: int,
    device: torch.device,
    prefer: Callable[..., Any] = torch.backends.cuda.preferred_blas_library,
) -> Iterator[None]:
    """What is captured inside keeps the library that is the faster one for so many rows.

    prefer: gives what the process prefers; with a name it changes that.
    """
    if device.type != "cuda" or num_rows not in _LT_ROWS:
        yield
        return
    before = prefer()
    prefer("cublaslt")
    try:
        yield
    finally:
        prefer(before)
