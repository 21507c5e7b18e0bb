"""LoRA of rows of many tokens against torch: mixed ranks, sums, missing modules, token ranges.

Triton's interpreter multiplies matrices of bfloat16 as if their bits were integers, so that
`tests.gpu.kernel_check` covers that type.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from loramux.kernels.gpu.lora.token_rows import WORDS, RowTerms, RowTokens, add_deltas

Pair = tuple[Tensor, Tensor]
IN, OUT = 136, 150
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def pair_of(rank: int, dtype: torch.dtype = torch.float32) -> Pair:
    return normal(rank, IN, dtype=dtype) * IN**-0.5, normal(OUT, rank, dtype=dtype) * 0.3


def terms_of(rows: list[list[tuple[Pair, float]]], *, is_aligned: bool = False) -> RowTerms:
    most = max(map(len, rows))
    places = torch.zeros(len(rows), most, WORDS, dtype=torch.int64)
    weights = torch.zeros(len(rows), most)
    for row, terms in enumerate(rows):
        for term, ((a, b), weight) in enumerate(terms):
            places[row, term] = torch.tensor([a.data_ptr(), b.data_ptr(), len(a), 0])
            weights[row, term] = weight
    largest = max((len(a) for terms in rows for (a, _), _ in terms), default=0)
    return RowTerms(places, weights, largest, is_aligned)


def expected(x: Tensor, y: Tensor, terms: list[tuple[Pair, float]]) -> Tensor:
    total = y.double()
    for (a, b), weight in terms:
        total = total + weight * (x.double() @ a.double().T) @ b.double().T
    return total


def rows_of(dtype: torch.dtype = torch.float32) -> list[list[tuple[Pair, float]]]:
    """Return the base, one adapter, a sum with a negative weight, ranks that are odd and large."""
    return [
        [],
        [(pair_of(4, dtype), 1.0)],
        [(pair_of(16, dtype), 0.5), (pair_of(3, dtype), -1.25)],
        [(pair_of(70, dtype), 1.0)],
    ]


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_each_row_gets_the_sum_of_its_adapters(
    dtype: torch.dtype, limit: float, num_tokens: int
) -> None:
    rows = rows_of(dtype)
    x = normal(len(rows), num_tokens, IN, dtype=dtype)
    before = normal(len(rows), num_tokens, OUT, dtype=dtype)
    y = before.clone()
    add_deltas(x, y, terms_of(rows))
    for row, terms in enumerate(rows):
        wanted = expected(x[row], before[row], terms)
        assert (y[row].double() - wanted).norm() <= limit * wanted.norm()
    assert torch.equal(y[0], before[0])


def test_a_row_has_the_same_bits_alone() -> None:
    rows = rows_of()
    x, before = normal(len(rows), 40, IN), normal(len(rows), 40, OUT)
    together = before.clone()
    add_deltas(x, together, terms_of(rows))
    for row, terms in enumerate(rows[1:], start=1):
        alone = before[row : row + 1].clone()
        add_deltas(x[row : row + 1], alone, terms_of([terms]))
        assert torch.equal(alone[0], together[row])


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_row_keeps_its_bits_beside_one_that_is_not_finite() -> None:
    pair, huge = pair_of(8), (torch.full((8, IN), 3e38), torch.full((OUT, 8), float("inf")))
    x, before = normal(3, 17, IN), normal(3, 17, OUT)
    harmless, hostile = before.clone(), before.clone()
    add_deltas(x, harmless, terms_of([[], [(pair, 1.0)], []]))
    add_deltas(x, hostile, terms_of([[(huge, 1.0)], [(pair, 1.0)], []]))
    assert torch.equal(hostile[1:], harmless[1:])
    assert not torch.isfinite(hostile[0]).any()


def test_inputs_may_be_parts_of_others_in_any_order() -> None:
    rows = rows_of()
    whole = normal(len(rows), 50, IN)
    channels_first = normal(len(rows), IN, 3, 2).permute(0, 2, 3, 1)
    vector = normal(1, IN).expand(len(rows), IN)
    for x in (whole[:, 20:45], whole[:, 3], channels_first, channels_first.flatten(1, 2), vector):
        before = normal(*x.shape[:-1], OUT)
        y = before.clone()
        add_deltas(x, y, terms_of(rows))
        for row, terms in enumerate(rows):
            wanted = expected(x[row], before[row], terms)
            assert torch.allclose(y[row].double(), wanted, atol=1e-4, rtol=0)


def test_rows_may_be_ranges_of_one_sequence() -> None:
    rows = rows_of()
    starts = [0, 5, 45, 46, 80]
    x, before = normal(starts[-1], IN), normal(starts[-1], OUT)
    y = before.clone()
    tokens = RowTokens(torch.tensor(starts, dtype=torch.int32), 40)
    add_deltas(x, y, terms_of(rows), tokens)
    for row, terms in enumerate(rows):
        part = slice(starts[row], starts[row + 1])
        wanted = expected(x[part], before[part], terms)
        assert torch.allclose(y[part].double(), wanted, atol=1e-4, rtol=0)


def test_aligned_matrices_give_the_same_result() -> None:
    rows = [[(pair_of(16), 1.0)], [(pair_of(8), 0.5)]]
    x, before = normal(2, 20, IN), normal(2, 20, OUT)
    plain, aligned = before.clone(), before.clone()
    add_deltas(x, plain, terms_of(rows))
    add_deltas(x, aligned, terms_of(rows, is_aligned=True))
    assert torch.equal(plain, aligned)


@pytest.mark.parametrize("ranges", [False, True])
def test_biases_are_added_at_the_weights(ranges: bool) -> None:
    """Beside matrices and alone, in sums and beside rows without one."""
    bias, other, pair = normal(OUT), normal(OUT), pair_of(70)
    nothing = (normal(0, IN), normal(OUT, 0))
    rows = [[], [(nothing, 0.7)], [(pair, 0.5), (nothing, -1.25)], [(pair, 1.0)]]
    terms = terms_of(rows)
    terms.places[1, 0, 3], terms.places[2, 1, 3] = bias.data_ptr(), bias.data_ptr()
    terms.places[2, 0, 3] = other.data_ptr()
    x, before = normal(len(rows), 20, IN), normal(len(rows), 20, OUT)
    wanted = torch.stack([expected(x[i], before[i], row) for i, row in enumerate(rows)])
    wanted[1] += 0.7 * bias
    wanted[2] += 0.5 * other - 1.25 * bias
    y = before.clone()
    if ranges:
        starts = torch.arange(0, 81, 20, dtype=torch.int32)
        add_deltas(x.flatten(0, 1), y.view(-1, OUT), terms, RowTokens(starts, 20))
    else:
        add_deltas(x, y, terms)
    assert torch.allclose(y.double(), wanted, atol=1e-4, rtol=0)
    assert torch.equal(y[0], before[0])
    alone = before[1:2].clone()
    only = RowTerms(terms.places[1:2, :1].contiguous(), terms.weights[1:2, :1], 1, is_aligned=False)
    add_deltas(x[1:2], alone, only)
    assert torch.equal(alone[0], y[1])
