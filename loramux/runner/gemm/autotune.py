"""Which of several products is the fastest, among weights that no cache holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from loramux.kernels.gpu.gemm.cublaslt import CublasLt, CublasLtError, Product, ProductShape

# As much is read in one measurement that no weight stays in the cache until the next one.
_MIN_BYTES_READ = 192 * 2**20
# As many of the first have their variations tried.
_NUM_LEADERS = 8
_NUM_FINALISTS = 5
_NUM_ROUNDS = 4
# Whatever is closer to torch's own choice than this may be noise.
_MIN_GAIN = 0.01
# Of finalists that are as close as this on a hot card, the most frugal is the fastest in a step.
_MIN_HOT_GAIN = 0.015

Name = TypeVar("Name")
Run = Callable[[], object]
Measure = Callable[[Run], float]
"""Runs it once; seconds, or whatever can be compared."""
Settle = Callable[[Sequence[Run]], list[float]]
"""Runs all in turns for long; the same for each."""


class Candidates(Protocol[Name]):
    def vary(self, leaders: Sequence[Name]) -> dict[Name, Run]:
        """More runs, like those with these names."""

    def frugality(self, name: Name) -> float:
        """The more of it, the less power is drawn."""


Follower = Callable[[Tensor], Run]
"""For y, a product or its parts: what launches the kernel that reads it, to be measured."""


@dataclass(frozen=True, slots=True)
class Clock:
    look: Measure
    settle: Settle | None = None
    """Decides among the finalists; None: the best of a few looks does."""


Way = tuple[int, bytes]
"""A number of parts, and an algorithm."""
WHOLE_BY_ANOTHER: Way = (1, b"")
"""Whole, and not by an algorithm of the library's that was chosen here."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One product by all the ways that there are, among weights that no cache holds."""

    library: CublasLt
    whole: ProductShape
    x: Tensor
    weights: Sequence[Tensor]
    follower: Follower | None = None
    _outputs: dict[int, tuple[Tensor, Run | None]] = field(default_factory=dict)
    """By number of parts: all runs write to the same."""

    def run(self, product: Product, num_parts: int = 1) -> Run:
        if num_parts not in self._outputs:
            self._outputs[num_parts] = self._output(num_parts)
        y, follow = self._outputs[num_parts]
        return run_of(product, self.x, self.weights, y, follow)

    def proposals(self, num_parts: int = 1) -> dict[Way, Run]:
        return self._runs(num_parts, self.library.proposals(self._shape(num_parts)))

    def vary(self, leaders: Sequence[Way]) -> dict[Way, Run]:
        found: dict[Way, Run] = {}
        for num_parts, algorithm in leaders:
            if algorithm:
                others = self.library.variations(self._shape(num_parts), algorithm)
                found |= self._runs(num_parts, others)
        return found

    def frugality(self, way: Way) -> float:
        """What is read once for several programs is not read by each of them.

        Nothing is as frugal as a product that is not written in parts, and read again.
        """
        if not way[1]:
            return 0.0 if self.follower is None else math.inf
        return self.library.num_sharing(way[1])

    def _output(self, num_parts: int) -> tuple[Tensor, Run | None]:
        shape = self._shape(num_parts)
        size = (num_parts, shape.num_rows, shape.num_outputs)
        y = self.x.new_empty(size, dtype=shape.y_dtype)
        y = y[0] if num_parts == 1 else y
        return y, None if self.follower is None else self.follower(y)

    def _shape(self, num_parts: int) -> ProductShape:
        return replace(self.whole, num_parts=num_parts)

    def _runs(self, num_parts: int, algorithms: Iterable[bytes]) -> dict[Way, Run]:
        shape = self._shape(num_parts)
        return {
            (num_parts, algorithm): self.run(self.library.product(shape, algorithm), num_parts)
            for algorithm in algorithms
        }


def fastest(
    runs: dict[Name, Run], clock: Clock, candidates: Candidates[Name] | None = None
) -> Name:
    """The name of the fastest run; that of the first, if no other is clearly faster."""
    first = next(iter(runs))
    times = _looked_at(runs, clock.look)
    if candidates is not None:
        more = candidates.vary(sorted(times, key=times.__getitem__)[:_NUM_LEADERS])
        more = {name: run for name, run in more.items() if name not in runs}
        runs = {**runs, **more}
        times |= _looked_at(more, clock.look)
    finalists = [first, *sorted(times, key=times.__getitem__)[:_NUM_FINALISTS]]
    finalists = list(dict.fromkeys(finalists))
    if clock.settle is not None:
        settled = clock.settle([runs[name] for name in finalists])
        times = dict(zip(finalists, settled, strict=True))
    else:
        for _ in range(_NUM_ROUNDS):
            for name in finalists:
                times[name] = min(times[name], clock.look(runs[name]))
    best, enough = min(finalists, key=times.__getitem__), (1 - _MIN_GAIN) * times[first]
    if times[best] >= enough:
        return first
    if clock.settle is None or candidates is None:
        return best
    limit = (1 + _MIN_HOT_GAIN) * times[best]
    close = [n for n in finalists if times[n] <= limit and (n == first or times[n] < enough)]
    return max(close, key=lambda name: (candidates.frugality(name), -times[name]))


def _looked_at(runs: dict[Name, Run], measure: Measure) -> dict[Name, float]:
    """Without those that fail."""
    times: dict[Name, float] = {}
    for name, run in runs.items():
        try:
            # Loads the kernel.
            run()
            times[name] = measure(run)
        except CublasLtError:
            continue
    return times


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
    follow: Run | None = None,
) -> Run:
    def run() -> None:
        for weight in weights:
            # As in a step, a product waits for the small kernel that writes x.
            x.mul_(1)
            product(x, weight, y)
            if follow is not None:
                follow()

    return run
