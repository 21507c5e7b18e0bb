"""The compiled LoRA kernel against the reference: short runs, long ones, and both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="no numba on this machine")

from loramux.kernels.cpu_jit import lora as lora_numba
from loramux.kernels.ops import LoraSlice, LoraWeights, Segment
from loramux.kernels.reference import lora as lora_torch

IN_FEATURES = 24
# Float32 sums of at most a few hundred products, in another order.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

POPULARITIES = {
    "distinct": [1] * 12,
    "identical": [12],
    "skewed": [9, 4, 2, 1, 1],
    "one prompt among decodes": [40, 1, 1, 1, 1],
    "two prompts": [50, 33],
    "an adapter with no rows": [2, 0, 2],
}


def make_weights(num_adapters: int, ranks: list[int], outs: list[int]) -> LoraWeights:
    """As lora/stacks.py lays them out: each adapter is one row of one storage."""
    width = IN_FEATURES * sum(ranks) + sum(r * out for r, out in zip(ranks, outs, strict=True)) + 5
    generator = torch.Generator().manual_seed(7)
    storage = torch.randn(num_adapters + 2, width, generator=generator)

    def view(offset: int, rows: int, columns: int) -> torch.Tensor:
        shape, strides = (num_adapters + 2, rows, columns), (width, columns, 1)
        return storage.as_strided(shape, strides, offset)

    slices = []
    offset, rank_start, out_start = IN_FEATURES * sum(ranks), 0, 0
    for rank, out in zip(ranks, outs, strict=True):
        slices.append(LoraSlice(view(offset, rank, out), rank_start, out_start))
        offset, rank_start, out_start = offset + rank * out, rank_start + rank, out_start + out
    return LoraWeights(a=view(0, IN_FEATURES, sum(ranks)), slices=tuple(slices))


def make_segments(counts: list[int], *, gap: int = 0, weight: float = 1.0) -> list[Segment]:
    segments, row = [], gap
    for slot, count in enumerate(counts):
        if count:
            segments.append(Segment(slot, row, row + count, weight))
        row += count + gap
    return segments


def run_both(
    segments: list[Segment], weights: LoraWeights, outs: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = max(segment.stop for segment in segments) + 3
    x, y = torch.randn(num_rows, IN_FEATURES), torch.randn(num_rows, sum(outs))
    expected, actual = y.clone(), y.clone()
    num_slots = len(weights.a) - 2
    for kernels, target in ((lora_torch, expected), (lora_numba, actual)):
        kernels.add_lora(target, x, weights, kernels.cut_rows(segments, num_slots))
    return expected, actual


@pytest.mark.parametrize("counts", POPULARITIES.values(), ids=POPULARITIES)
@pytest.mark.parametrize("ranks", [[1], [3, 3, 3], [64, 5], [200]], ids=str)
@pytest.mark.parametrize("weight", [1.0, -0.3])
def test_equals_the_reference(counts: list[int], ranks: list[int], weight: float) -> None:
    outs = [16, 8, 8][: len(ranks)]
    weights = make_weights(len(counts), ranks, outs)
    expected, actual = run_both(make_segments(counts, gap=1, weight=weight), weights, outs)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    gap=st.integers(0, 2),
)
def test_any_mix_equals_the_reference(counts: list[int], ranks: list[int], gap: int) -> None:
    outs = [12, 4, 4][: len(ranks)]
    weights = make_weights(len(counts), ranks, outs)
    expected, actual = run_both(make_segments(counts, gap=gap), weights, outs)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_adapters_that_share_rows_are_never_computed_at_once() -> None:
    """Two threads that add to one row would lose one of the sums."""
    segments = [Segment(0, 0, 4, 0.5), Segment(1, 2, 6, 2.0), Segment(2, 2, 3), Segment(3, 6, 8)]
    rows = lora_numba.cut_rows(segments, 4)
    for runs, _ in rows.rounds:
        taken = [row for _, start, stop in runs.tolist() for row in range(start, stop)]
        assert len(taken) == len(set(taken))
    expected, actual = run_both(segments, make_weights(4, [4], [16]), [16])
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    weights = make_weights(4, [4, 9], [16, 8])
    x, y = torch.randn(12, IN_FEATURES), torch.randn(12, 24)
    together, alone = y.clone(), y.clone()
    segments = [Segment(slot, 3 * slot, 3 * slot + 3) for slot in range(4)]
    lora_numba.add_lora(together, x, weights, lora_numba.cut_rows(segments, 4))
    single = lora_numba.cut_rows([Segment(2, 7, 8)], 4)
    lora_numba.add_lora(alone, x, weights, single)
    assert torch.equal(alone[7], together[7])
    assert torch.equal(alone[:7], y[:7]) and torch.equal(alone[8:], y[8:])


@pytest.mark.parametrize("num_rows", [2, 3, 5, 13, 40, 70])
def test_loops_and_tiles_give_a_row_the_same_bits(num_rows: int) -> None:
    """Or a greedy answer would depend on how many others use its adapter in the step."""
    weights = make_weights(2, [16, 5], [40, 19])
    x, y = torch.randn(num_rows, IN_FEATURES), torch.randn(num_rows, 59)
    together = y.clone()
    run = lora_numba.cut_rows([Segment(1, 0, num_rows, 0.7)], 2)
    lora_numba.add_lora(together, x, weights, run)
    for row in range(num_rows):
        alone = y.clone()
        single = lora_numba.cut_rows([Segment(1, row, row + 1, 0.7)], 2)
        lora_numba.add_lora(alone, x, weights, single)
        assert torch.equal(alone[row], together[row])


def test_weights_of_several_storages_are_refused() -> None:
    weights = LoraWeights(torch.randn(1, 24, 2), (LoraSlice(torch.randn(1, 2, 8), 0, 0),))
    rows = lora_numba.cut_rows([Segment(0, 0, 1)], 1)
    with pytest.raises(AssertionError):
        lora_numba.add_lora(torch.randn(1, 8), torch.randn(1, 24), weights, rows)
