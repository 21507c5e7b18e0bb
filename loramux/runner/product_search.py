"""Which of several products is the fastest, among weights that no cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from loramux.kernels.cublaslt import CublasLtError, Product

# As much is read in one measurement that no weight stays in the cache until the next one.
_MIN_BYTES_READ = 192 * 2**20
_NUM_FINALISTS = 5
_NUM_ROUNDS = 4
# Whatever is closer to torch's own choice than this may be noise.
_MIN_GAIN = 0.01

Name = TypeVar("Name")
Measure = Callable[[Callable[[], None]], float]
"""Runs it once; seconds, or whatever can be compared."""
Follower = Callable[[Tensor], Callable[[], None]]
"""For y, a product or its parts: what launches the kernel that reads it, to be measured."""


def fastest(runs: dict[Name, Callable[[], None]], measure: Measure) -> Name:
    """The name of the fastest run; that of the first, if no other is clearly faster."""
    first = next(iter(runs))
    times: dict[Name, float] = {}
    for name, run in runs.items():
        try:
            # Loads the kernel.
            run()
            times[name] = measure(run)
        except CublasLtError:
            continue
    finalists = {first, *sorted(times, key=times.__getitem__)[:_NUM_FINALISTS]}
    for _ in range(_NUM_ROUNDS):
        for name in finalists:
            times[name] = min(times[name], measure(runs[name]))
    best = min(finalists, key=times.__getitem__)
    return best if times[best] < (1 - _MIN_GAIN) * times[first] else first


def with_torch(x: Tensor, weight: Tensor, y: Tensor) -> None:
    torch.mm(x, weight.t(), out=y)


def some_of(family: Sequence[Tensor], num_outputs: int) -> list[Tensor]:
    """As many weights as fill a cache, or all that there are."""
    num_bytes = family[0][:num_outputs].nbytes
    count = max(2, -(-_MIN_BYTES_READ // num_bytes))
    return [weight[:num_outputs] for weight in family[:count]]


def run_of(
    product: Product,
    x: Tensor,
    weights: Sequence[Tensor],
    y: Tensor,
    follow: Callable[[], None] | None = None,
) -> Callable[[], None]:
    def run() -> None:
        for weight in weights:
            # As in a step, a product waits for the small kernel that writes x.
            x.mul_(1)
            product(x, weight, y)
            if follow is not None:
                follow()

    return run
