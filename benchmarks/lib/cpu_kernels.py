"""Time the LoRA kernels of the CPU on one decoder layer beside the base's GEMMs.

One decode step with the shapes of SmolLM2, beside the torch reference on the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.lora_cases import RANK, Case
from benchmarks.lib.report import Table
from loramux.kernels.cpu import lora as lora_cpu
from loramux.kernels.ops import LoraKernels, LoraSlice, LoraWeights, Segment
from loramux.kernels.reference import lora as lora_torch

HIDDEN, KEYS, INNER = 576, 192, 1536
SITES = (
    (HIDDEN, (HIDDEN, KEYS, KEYS)),
    (HIDDEN, (HIDDEN,)),
    (HIDDEN, (INNER, INNER)),
    (INNER, (HIDDEN,)),
)
"""(in features, out features of each slice)"""
NUM_SITES = {"qkvo": 2, "all": 4}
CASES = (
    Case(1, "qkvo", "identical", 0.0),
    Case(1, "all", "identical", 0.0),
    Case(8, "all", "distinct", 0.0),
    Case(32, "all", "identical", 0.0),
    Case(32, "all", "skewed", 0.0),
    Case(32, "all", "distinct", 0.0),
)


def segments_of(ids: Sequence[int]) -> list[Segment]:
    """Return the runs of equal adapter ids."""
    starts = [row for row in range(len(ids)) if row == 0 or ids[row] != ids[row - 1]]
    stops = [*starts[1:], len(ids)]
    return [Segment(ids[start], start, stop) for start, stop in zip(starts, stops, strict=True)]


def random_weights(num_adapters: int, in_features: int, outs: Sequence[int]) -> LoraWeights:
    slices = []
    for number, out_features in enumerate(outs):
        b = torch.randn(num_adapters, RANK, out_features) * 0.02
        slices.append(LoraSlice(b, number * RANK, sum(outs[:number])))
    return LoraWeights(torch.randn(num_adapters, in_features, RANK * len(outs)), tuple(slices))


def time_work(work: Callable[[], None], num_runs: int) -> float:
    """Return the microseconds of the fastest run."""
    seconds = []
    for _ in range(num_runs + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]) * 1e6


@torch.inference_mode()
def time_case(case: Case, num_runs: int) -> dict[str, object]:
    sites = SITES[: NUM_SITES[case.sites]]
    weights = [random_weights(case.num_adapters, i, outs) for i, outs in sites]
    bases = [torch.randn(sum(outs), i) * 0.02 for i, outs in SITES]
    x = [torch.randn(case.num_tokens, i) for i, _ in SITES]
    y = [torch.randn(case.num_tokens, sum(outs)) for _, outs in SITES]
    segments = segments_of(case.adapters().tolist())

    def base() -> None:
        for one, weight in zip(x, bases, strict=True):
            F.linear(one, weight)

    def lora(kernels: LoraKernels) -> Callable[[], None]:
        rows = kernels.cut_rows(segments, case.num_adapters)

        def add() -> None:
            for site, some in enumerate(weights):
                kernels.add_lora(y[site], x[site], some, rows)

        return add

    error = relative_error(x[0], y[0], weights[0], segments)
    assert error < 1e-4, f"the CPU kernel differs from the reference by {error:.1e}"
    return {
        "tokens": case.num_tokens,
        "sites": case.sites,
        "adapters": case.num_adapters,
        "base": time_work(base, num_runs),
        "alone": time_work(lora(lora_cpu), num_runs),
        "torch reference": time_work(lora(lora_torch), num_runs),
    }


def relative_error(x: Tensor, y: Tensor, weights: LoraWeights, segments: list[Segment]) -> float:
    outs = []
    for kernels in (lora_cpu, lora_torch):
        outs.append(y.clone())
        kernels.add_lora(outs[-1], x, weights, kernels.cut_rows(segments, weights.a.shape[0]))
    return float((outs[0] - outs[1]).norm() / (outs[1] - y).norm())


def run_cases(num_runs: int = 20) -> Table:
    torch.manual_seed(0)
    return [time_case(case, num_runs) for case in CASES]
