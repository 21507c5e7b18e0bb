"""The fast CPU kernel against the reference: popularity x ranks x slices x weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loramux.kernels.cpu import lora as lora_cpu
from loramux.kernels.ops import LoraSlice, LoraWeights, Segment
from loramux.kernels.reference import lora as lora_torch
from loramux.kernels.segments import rounds_of

IN_FEATURES = 24
# Float32 sums of at most a few hundred products, in another order.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

POPULARITIES = {
    "distinct": [1] * 12,
    "identical": [12],
    "uniform": [3] * 4,
    "skewed": [9, 4, 2, 1, 1],
    "one prompt among decodes": [40, 1, 1, 1, 1],
    "two prompts": [20, 33],
    "an adapter with no rows": [2, 0, 2],
}


def make_weights(
    num_adapters: int, ranks: list[int], outs: list[int], spare: int = 0
) -> LoraWeights:
    generator = torch.Generator().manual_seed(7)
    slots = num_adapters + spare
    slices = []
    rank_start = out_start = 0
    for rank, out in zip(ranks, outs, strict=True):
        if rank:
            b = torch.randn(slots, rank, out, generator=generator)
            slices.append(LoraSlice(b, rank_start, out_start))
        rank_start += rank
        out_start += out
    a = torch.randn(slots, IN_FEATURES, sum(ranks), generator=generator)
    return LoraWeights(a=a, slices=tuple(slices))


def make_segments(counts: list[int], *, gap: int = 0, weight: float = 1.0) -> list[Segment]:
    segments, row = [], gap
    for slot, count in enumerate(counts):
        if count:
            segments.append(Segment(slot, row, row + count, weight))
        row += count + gap
    return segments


def run_both(
    counts: list[int], segments: list[Segment], weights: LoraWeights, outs: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    num_rows = max(segment.stop for segment in segments) + 3
    x = torch.randn(num_rows, IN_FEATURES, generator=generator)
    y = torch.randn(num_rows, sum(outs), generator=generator)
    expected, actual = y.clone(), y.clone()
    for kernels, target in ((lora_torch, expected), (lora_cpu, actual)):
        kernels.add_lora(target, x, weights, kernels.cut_rows(segments, len(counts)))
    return expected, actual


@pytest.mark.parametrize("counts", POPULARITIES.values(), ids=POPULARITIES)
@pytest.mark.parametrize("ranks", [[1], [3, 3, 3], [8, 0, 8], [64, 5], [200]], ids=str)
@pytest.mark.parametrize("gap", [0, 2])
def test_equals_the_reference(counts: list[int], ranks: list[int], gap: int) -> None:
    outs = [16, 8, 8][: len(ranks)]
    weights = make_weights(len(counts), ranks, outs, spare=2)
    expected, actual = run_both(counts, make_segments(counts, gap=gap), weights, outs)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_one_row_each_with_weights_and_an_idle_slot(weight: float) -> None:
    weights = make_weights(4, [4, 4], [16, 8])
    counts = [1, 0, 1, 1]
    expected, actual = run_both(
        counts, make_segments(counts, gap=1, weight=weight), weights, [16, 8]
    )
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_rows_without_adapter_keep_their_bits() -> None:
    segments = make_segments([1, 5, 1], gap=2)
    weights = make_weights(3, [4], [16])
    y = torch.randn(20, 16)
    before = y.clone()
    lora_cpu.add_lora(y, torch.randn(20, IN_FEATURES), weights, lora_cpu.cut_rows(segments, 3))
    used = {row for segment in segments for row in range(segment.start, segment.stop)}
    unused = [row for row in range(20) if row not in used]
    assert torch.equal(y[unused], before[unused])
    assert not torch.equal(y, before)


@pytest.mark.parametrize("counts", POPULARITIES.values(), ids=POPULARITIES)
def test_a_weight_scales_the_adapter(counts: list[int]) -> None:
    weights = make_weights(len(counts), [4, 2], [16, 8])
    segments = make_segments(counts, weight=-0.3)
    expected, actual = run_both(counts, segments, weights, [16, 8])
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_two_adapters_on_one_row_add_up() -> None:
    segments = [Segment(0, 0, 4, 0.5), Segment(1, 2, 6, 2.0), Segment(2, 2, 3, 1.0)]
    weights = make_weights(3, [4], [16])
    expected, actual = run_both([4, 4, 1], segments, weights, [16])
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    gap=st.integers(0, 2),
)
def test_any_mix_equals_the_reference(counts: list[int], ranks: list[int], gap: int) -> None:
    outs = [12, 4, 4][: len(ranks)]
    weights = make_weights(len(counts), ranks, outs)
    expected, actual = run_both(counts, make_segments(counts, gap=gap), weights, outs)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", POPULARITIES.values(), ids=POPULARITIES)
@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("weight", [1.0, 0.75])
def test_a_row_has_the_same_bits_in_any_mix(
    dtype: torch.dtype, counts: list[int], gap: int, weight: float
) -> None:
    """Whole numbers: sums are the same in any order, so only what is rounded, and when, differs."""
    generator = torch.Generator().manual_seed(3)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    slots = len(counts)
    pieces = (LoraSlice(whole(slots, 5, 16), 0, 0), LoraSlice(whole(slots, 5, 16), 5, 16))
    weights = LoraWeights(a=whole(slots, IN_FEATURES, 10), slices=pieces)
    segments = make_segments(counts, gap=gap, weight=weight)
    x = whole(segments[-1].stop + gap, IN_FEATURES)
    base = torch.randn(x.shape[0], 32, generator=generator).to(dtype)

    together, alone = base.clone(), base.clone()
    lora_cpu.add_lora(together, x, weights, lora_cpu.cut_rows(segments, slots))
    for segment in segments:
        for row in range(segment.start, segment.stop):
            lone = [Segment(segment.slot, row, row + 1, weight)]
            lora_cpu.add_lora(alone, x, weights, lora_cpu.cut_rows(lone, slots))
    assert not torch.equal(together, base)
    assert torch.equal(together, alone)


selections = st.lists(st.integers(0, 3), unique=True, max_size=3)


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(selections, st.integers(1, 20)), min_size=1, max_size=6))
def test_sums_of_adapters_equal_the_reference_in_the_order_of_their_segments(
    rows: list[tuple[list[int], int]],
) -> None:
    segments, start = [], 0
    for slots, count in rows:
        segments += [Segment(slot, start, start + count, slot - 1.5) for slot in slots]
        start += count
    if not segments:
        return
    expected, actual = run_both([1] * 4, segments, make_weights(4, [3, 2], [16, 8]), [16, 8])
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    position = {segment: number for number, segment in enumerate(segments)}
    rounds = rounds_of(segments)
    for members in rounds:
        assert all(a.stop <= b.start for a, b in zip(members, members[1:], strict=False))
    in_order = [position[segment] for members in rounds for segment in members]
    for row in range(start):
        of_row = [n for n in in_order if segments[n].start <= row < segments[n].stop]
        assert of_row == sorted(of_row), "another order than that of the selection"
