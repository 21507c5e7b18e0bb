"""Autotuner: the fastest way to compute a GEMM, timed over weights that no cache holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from loramux.kernels.gpu.gemm.cublaslt import CublasLt, CublasLtError, Gemm, GemmShape
from loramux.runner.gemm.table import TunedGemm

# One measurement reads so many bytes that no weight stays in the cache until the next one.
_MIN_BYTES_READ = 192 * 2**20
# The fastest candidates whose variants are tried.
_NUM_LEADERS = 8
_NUM_FINALISTS = 5
_NUM_ROUNDS = 4
# A smaller gain over torch's own choice may be noise.
_MIN_GAIN = 0.01
# Among finalists this close in steady state, the one that draws the least power is the fastest in
# a whole step.
_MIN_STEADY_GAIN = 0.015
# With more rows an unsplit GEMM has tiles for all SMs; with fewer, split-K is no faster than a GEMM
# of small tiles.
_SPLIT_K_ROWS = range(97, 321)
# At these sizes the GPU is power-limited; short timings overestimate steady-state clocks.
_POWER_LIMITED_ROWS = range(97, 321)
_NUM_SPLITS = (2,)
# K of a split is a multiple of this.
_SPLIT_ALIGNMENT = 64

Name = TypeVar("Name")
Run = Callable[[], object]
Consumer = Callable[[Tensor], Run]
"""For y or its split-K partial sums: returns what launches the kernel that reads it."""

Choice = tuple[int, bytes]
"""Number of splits, and an algorithm."""
DEFAULT: Choice = (1, b"")
"""No split-K, and torch's own choice or the one that was tuned before."""


@dataclass(frozen=True, slots=True)
class Timing:
    quick: Callable[[Run], float]
    """Runs once; returns seconds."""
    steady: Callable[[Sequence[Run]], list[float]] | None = None
    """Runs all in turns until clocks are steady; decides among the finalists. None: the best of a
    few quick timings decides."""


class Variants(Protocol[Name]):
    def variants(self, leaders: Sequence[Name]) -> dict[Name, Run]:
        """Further candidates that resemble the leaders."""

    def power_saving(self, name: Name) -> float:
        """Higher for candidates that draw less power."""


@dataclass(frozen=True, slots=True)
class GemmCandidates:
    """One GEMM by every algorithm that the library offers."""

    library: CublasLt
    shape: GemmShape
    """Without split-K."""
    x: Tensor
    weights: Sequence[Tensor]
    consumer: Consumer | None = None
    _outputs: dict[int, tuple[Tensor, Run | None]] = field(default_factory=dict)
    """By number of splits: all runs write to the same tensor."""

    def run(self, gemm: Gemm, num_splits: int = 1) -> Run:
        if num_splits not in self._outputs:
            self._outputs[num_splits] = self._output(num_splits)
        y, consume = self._outputs[num_splits]
        return timed_run(gemm, self.x, self.weights, y, consume)

    def candidates(self, num_splits: int = 1) -> dict[Choice, Run]:
        return self._runs(num_splits, self.library.candidates(self._shape(num_splits)))

    def variants(self, leaders: Sequence[Choice]) -> dict[Choice, Run]:
        found: dict[Choice, Run] = {}
        for num_splits, algorithm in leaders:
            if algorithm:
                others = self.library.variants(self._shape(num_splits), algorithm)
                found |= self._runs(num_splits, others)
        return found

    def power_saving(self, choice: Choice) -> float:
        """CTAs of a cluster that share their reads draw less power than the same CTAs alone.

        A GEMM without split-K saves most: no partial sums are written and read again.
        """
        if not choice[1]:
            return 0.0 if self.consumer is None else math.inf
        return self.library.cluster_size(choice[1])

    def _output(self, num_splits: int) -> tuple[Tensor, Run | None]:
        shape = self._shape(num_splits)
        y = self.x.new_empty((num_splits, shape.m, shape.n), dtype=shape.y_dtype)
        y = y[0] if num_splits == 1 else y
        return y, None if self.consumer is None else self.consumer(y)

    def _shape(self, num_splits: int) -> GemmShape:
        return replace(self.shape, num_splits=num_splits)

    def _runs(self, num_splits: int, algorithms: Iterable[bytes]) -> dict[Choice, Run]:
        shape = self._shape(num_splits)
        return {
            (num_splits, algorithm): self.run(self.library.gemm(shape, algorithm), num_splits)
            for algorithm in algorithms
        }


@dataclass(frozen=True, slots=True)
class FusedSwiglu:
    """The gate_up GEMM with its activation: in one kernel, or one after the other."""

    supports: Callable[[Tensor, Tensor], bool]
    fused: Callable[[Tensor, Tensor], object]
    """(x, weight)"""
    activate: Callable[[Tensor], object]
    """Reads what a GEMM without activation has written."""


@dataclass(frozen=True, slots=True)
class Autotuner:
    library: CublasLt
    timing: Timing

    def tune(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        *,
        first_m: int | None = None,
        consumer: Consumer | None = None,
        swiglu: FusedSwiglu | None = None,
    ) -> TunedGemm:
        """Tunes x @ weight.T. x [rows, inputs]   weights: [outputs, inputs] each, used in turn

        consumer: the kernel behind a GEMM that may be split-K; None: it may not
        swiglu: the ops of a gate_up weight
        """
        shape = GemmShape(len(x), len(weights[0]), x.shape[1], x.dtype)
        plain = GemmCandidates(self.library, shape, x, weights)
        runs = {DEFAULT: plain.run(torch_gemm), **plain.candidates()}
        algorithm = fastest(runs, self._timing(shape), plain)[1]
        gemm = self.library.gemm(shape, algorithm) if algorithm else torch_gemm
        num_splits, split_algorithm = DEFAULT
        if consumer is not None and shape.m in _SPLIT_K_ROWS:
            candidates = GemmCandidates(self.library, shape, x, weights, consumer)
            num_splits, split_algorithm = self._tune_split_k(candidates, gemm)
        return TunedGemm(
            first_m=shape.m if first_m is None else first_m,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            dtype=x.dtype,
            algorithm=algorithm,
            num_splits=num_splits,
            split_algorithm=split_algorithm,
            fused_swiglu=swiglu is not None and self._is_fused_faster(swiglu, gemm, x, weights),
        )

    def _tune_split_k(self, candidates: GemmCandidates, gemm: Gemm) -> Choice:
        """Every candidate is timed together with its consumer."""
        runs = {DEFAULT: candidates.run(gemm)}
        for num_splits in _NUM_SPLITS:
            if candidates.shape.k % (num_splits * _SPLIT_ALIGNMENT) == 0:
                runs |= candidates.candidates(num_splits)
        return fastest(runs, self._timing(candidates.shape), candidates)

    def _is_fused_faster(
        self, swiglu: FusedSwiglu, gemm: Gemm, x: Tensor, weights: Sequence[Tensor]
    ) -> bool:
        if not swiglu.supports(x, weights[0]):
            return False
        shape = GemmShape(len(x), len(weights[0]), x.shape[1], x.dtype)
        y = x.new_empty(shape.m, shape.n)

        def fused(x: Tensor, weight: Tensor, y: Tensor) -> None:
            del y
            swiglu.fused(x, weight)

        runs = {
            False: timed_run(gemm, x, weights, y, lambda: swiglu.activate(y)),
            True: timed_run(fused, x, weights, y),
        }
        return fastest(runs, self._timing(shape))

    def _timing(self, shape: GemmShape) -> Timing:
        if shape.m in _POWER_LIMITED_ROWS:
            return self.timing
        return replace(self.timing, steady=None)


def fastest(runs: dict[Name, Run], timing: Timing, variants: Variants[Name] | None = None) -> Name:
    """Return the name of the fastest run; the first one's unless another is clearly faster."""
    first = next(iter(runs))
    times = _quick_times(runs, timing)
    if variants is not None:
        more = variants.variants(sorted(times, key=times.__getitem__)[:_NUM_LEADERS])
        more = {name: run for name, run in more.items() if name not in runs}
        runs = {**runs, **more}
        times |= _quick_times(more, timing)
    finalists = [first, *sorted(times, key=times.__getitem__)[:_NUM_FINALISTS]]
    finalists = list(dict.fromkeys(finalists))
    if timing.steady is not None:
        steady = timing.steady([runs[name] for name in finalists])
        times = dict(zip(finalists, steady, strict=True))
    else:
        for _ in range(_NUM_ROUNDS):
            for name in finalists:
                times[name] = min(times[name], timing.quick(runs[name]))
    best, enough = min(finalists, key=times.__getitem__), (1 - _MIN_GAIN) * times[first]
    if times[best] >= enough:
        return first
    if timing.steady is None or variants is None:
        return best
    limit = (1 + _MIN_STEADY_GAIN) * times[best]
    close = [n for n in finalists if times[n] <= limit and (n == first or times[n] < enough)]
    return max(close, key=lambda name: (variants.power_saving(name), -times[name]))


def _quick_times(runs: dict[Name, Run], timing: Timing) -> dict[Name, float]:
    """Skips candidates that fail."""
    times: dict[Name, float] = {}
    for name, run in runs.items():
        try:
            # The first run loads the kernel.
            run()
            times[name] = timing.quick(run)
        except CublasLtError:
            continue
    return times


def torch_gemm(x: Tensor, weight: Tensor, y: Tensor) -> None:
    torch.mm(x, weight.t(), out=y)


def num_cold_weights(num_bytes: int) -> int:
    """Weights of this size that a measurement needs so that none stays in the cache."""
    return max(2, -(-_MIN_BYTES_READ // num_bytes))


def timed_run(
    gemm: Gemm, x: Tensor, weights: Sequence[Tensor], y: Tensor, consume: Run | None = None
) -> Run:
    def run() -> None:
        for weight in weights:
            # As in a step, the GEMM waits for the small kernel that writes x.
            x.mul_(1)
            gemm(x, weight, y)
            if consume is not None:
                consume()

    return run
