"""Products over packed weights, against float64: every kind of tile, part and rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="no numba on this machine")

from loramux.kernels.cpu_jit import gemm as gemm_numba
from loramux.kernels.cpu_jit.tiles import SHAPE, WIDTH

DEPTH = SHAPE.max_depth


def operands(
    num_rows: int, out_features: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    shapes = (num_rows, in_features), (out_features, in_features), (out_features,)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, bias


def check(num_rows: int, out_features: int, in_features: int, has_bias: bool) -> None:
    x, weight, bias = operands(num_rows, out_features, in_features)
    given_bias = bias if has_bias else None
    expected = x.double() @ weight.double().t()
    expected = expected + bias.double() if has_bias else expected
    actual = gemm_numba.multiply(x, gemm_numba.pack(weight, given_bias))
    # Sums of in_features products of about 1, each rounded.
    torch.testing.assert_close(actual.double(), expected, atol=1e-6 * in_features + 1e-5, rtol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    out_features=st.integers(1, 5 * WIDTH),
    in_features=st.integers(1, 50),
    has_bias=st.booleans(),
)
def test_any_shape_equals_the_exact_gemm(
    num_rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    check(num_rows, out_features, in_features, has_bias)


@pytest.mark.parametrize("in_features", [DEPTH, DEPTH + 1, 2 * DEPTH, 2 * DEPTH + 3])
@pytest.mark.parametrize("out_features", [3 * WIDTH, 2 * WIDTH + 5])
@pytest.mark.parametrize("num_rows", [3, 13])
def test_parts_of_the_inner_dimension_add_up(
    num_rows: int, out_features: int, in_features: int
) -> None:
    check(num_rows, out_features, in_features, True)


@pytest.mark.parametrize("num_rows", [256, 257, 519])
@pytest.mark.parametrize("in_features", [8, 300, DEPTH + 9])
def test_many_rows_are_packed_by_all_threads_and_go_by_in_blocks(
    num_rows: int, in_features: int
) -> None:
    check(num_rows, 2 * WIDTH + 1, in_features, False)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 32, 260])
def test_a_row_has_the_same_bits_alone_and_among_others(num_rows: int) -> None:
    x, weight, bias = operands(num_rows, 2 * WIDTH + 3, DEPTH + 7)
    matrix = gemm_numba.pack(weight, bias)
    together = gemm_numba.multiply(x, matrix)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(gemm_numba.multiply(x[row : row + 1], matrix)[0], together[row])


def test_values_that_are_no_numbers_stay_in_their_row_and_column() -> None:
    """Neither a neighbouring row nor a column of the padding may take part in a sum."""
    x, weight, _ = operands(9, WIDTH + 1, 16)
    x[4, 3] = float("nan")
    weight[WIDTH, 5] = float("inf")
    y = gemm_numba.multiply(x, gemm_numba.pack(weight, None))
    assert y[4].isnan().all()
    rest = torch.cat([y[:4], y[5:]])
    assert rest[:, :WIDTH].isfinite().all() and rest[:, WIDTH].isinf().all()


def test_rows_with_gaps_between_them_are_read_right() -> None:
    x, weight, _ = operands(6, WIDTH, 32)
    matrix = gemm_numba.pack(weight[:, :16].contiguous(), None)
    expected = gemm_numba.multiply(x[:, 8:24].contiguous(), matrix)
    assert torch.equal(gemm_numba.multiply(x[:, 8:24], matrix), expected)
