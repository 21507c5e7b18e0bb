"""Extras of adapters on a GPU.

All kernels wait for the kernel ahead before they read anything, and only then let the next one
start, so that they may stand between any two kernels of a step.
"""

from __future__ import annotations

from loramux.kernels.gpu.extras.vectors import embed_rows, scale_add, scale_logits
from loramux.kernels.gpu.extras.weights import (
    add_low_rank_logits,
    replace_logits,
    replace_outputs,
)

__all__ = [
    "add_low_rank_logits",
    "embed_rows",
    "replace_logits",
    "replace_outputs",
    "scale_add",
    "scale_logits",
]
