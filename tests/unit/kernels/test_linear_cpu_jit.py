"""A product with its adapters in one go, against both one after the other: to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="no numba on this machine")

from loramux.kernels.cpu_jit import elementwise as fused_numba
from loramux.kernels.cpu_jit import gemm as gemm_numba
from loramux.kernels.cpu_jit import linear as site_numba
from loramux.kernels.cpu_jit import lora as lora_numba
from loramux.kernels.ops import LoraRows, LoraWeights, NormArrays, Segment
from tests.unit.kernels.test_lora_numba import IN_FEATURES, make_weights

Adapters = list[tuple[LoraWeights, LoraRows]]


def both(num_rows: int, out: int, adapters: Adapters) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(num_rows, IN_FEATURES), torch.randn(out, IN_FEATURES)
    matrix = gemm_numba.pack(weight, torch.randn(out))
    expected = gemm_numba.multiply(x, matrix)
    for weights, rows in adapters:
        lora_numba.add_lora(expected, x, weights, rows)
    y = torch.full_like(expected, float("nan"))
    site_numba.linear_into(x.numpy(), matrix, adapters, y.numpy())
    return expected, y


@pytest.mark.parametrize("num_rows", [2, 9, 40, 300])
@pytest.mark.parametrize("out", [24, 59])
def test_adapters_of_one_stack(num_rows: int, out: int) -> None:
    """Covers a last panel that is wider than y, and several blocks of rows."""
    weights = make_weights(3, [16, 5], [out - 19, 19])
    third = num_rows // 3
    segments = [Segment(2, 0, third), Segment(0, third, third + 1, 0.5)]
    segments.append(Segment(1, third + 1, num_rows))
    rows = lora_numba.cut_rows([s for s in segments if s.stop > s.start], 3)
    expected, actual = both(num_rows, out, [(weights, rows)])
    assert torch.equal(actual, expected)


def test_no_adapter() -> None:
    expected, actual = both(7, 40, [])
    assert torch.equal(actual, expected)


def test_several_stacks_and_adapters_that_share_rows() -> None:
    cut = lora_numba.cut_rows
    shared = cut([Segment(0, 0, 4, 0.5), Segment(1, 2, 6, 2.0)], 2)
    assert len(shared.rounds) == 2
    stacks = [(make_weights(2, [4], [40]), shared)]
    stacks.append((make_weights(1, [8], [40]), cut([Segment(0, 6, 9)], 1)))
    for adapters in (stacks, stacks[:1], stacks[1:]):
        expected, actual = both(9, 40, adapters)
        assert torch.equal(actual, expected)


def test_threads_that_find_all_work_taken_leave_the_sums_alone() -> None:
    weights = make_weights(1, [4], [24])
    rows = lora_numba.cut_rows([Segment(0, 1, 2)], 1)
    for _ in range(50):
        expected, actual = both(2, 24, [(weights, rows)])
        assert torch.equal(actual, expected)


def stacks_of(kind: str, num_rows: int) -> Adapters:
    segments = [Segment(0, 0, 1), Segment(1, 1, num_rows)]
    stack = make_weights(2, [4], [40]), lora_numba.cut_rows(segments, 2)
    return {"none": [], "one": [stack], "two": [stack, stack]}[kind]


@pytest.mark.parametrize("stacks", ["none", "one", "two"])
@pytest.mark.parametrize("num_rows", [2, 33])
def test_the_work_behind_has_the_bits_of_its_own_loops(num_rows: int, stacks: str) -> None:
    """A single row goes by those, and may not have another answer for it."""
    adapters = stacks_of(stacks, num_rows)
    x = torch.randn(num_rows, IN_FEATURES).numpy()
    matrix = gemm_numba.pack(torch.randn(40, IN_FEATURES), None)
    y, work_y = np.empty((2, num_rows, 40), np.float32)
    site_numba.linear_into(x, matrix, adapters, y)

    mixed, work_mixed = np.empty((2, num_rows, 20), np.float32)
    fused_numba.silu_mul_into(y, mixed)
    work = fused_numba.silu_mul_epilogue(work_mixed)
    site_numba.linear_into(x, matrix, adapters, work_y, work)
    assert np.array_equal(work_mixed, mixed)

    norm = NormArrays(np.random.default_rng(0).random(40, np.float32), np.float32(1e-5))
    hidden = np.random.default_rng(1).random((num_rows, 40), np.float32)
    work_hidden = hidden.copy()
    normed, work_normed = np.empty((2, num_rows, 40), np.float32)
    fused_numba.add_norm_into(y, hidden, (norm, None), normed)
    work = fused_numba.add_norm_epilogue(work_hidden, norm, work_normed)
    site_numba.linear_into(x, matrix, adapters, work_y, work)
    assert np.array_equal(work_normed, normed) and np.array_equal(work_hidden, hidden)
