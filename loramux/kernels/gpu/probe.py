"""A kernel of one program, which shows that Triton can compile and launch on a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def run_probe(device: str) -> bool:
    """Run the kernel and return whether its result is right."""
    numbers = torch.arange(16, dtype=torch.float32, device=device)
    _double[(1,)](numbers, SIZE=numbers.numel(), num_warps=1)
    return numbers.tolist() == [2.0 * number for number in range(16)]


@triton.jit
def _double(numbers, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(numbers + places, tl.load(numbers + places) * 2)
