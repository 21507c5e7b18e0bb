"""Makes torch's exp, sqrt, sin and cos on a CPU exact from their first call on.

On x86 torch computes them with MKL's vector math, whose versions up to 2024.2 detect the CPU in the
first call of a process and store the raw number of its type for a moment, before that of the tables
of functions. Tensors of 2048 elements or more are computed by several threads: one that read the
raw number took the table of the lowest accuracy, and its part of the result had errors of 1e-4.
"""

from __future__ import annotations

import torch


def detect_cpu() -> None:
    """Make MKL detect the CPU on the calling thread; call it before several threads compute."""
    torch.zeros(1).cos()
