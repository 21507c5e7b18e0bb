from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.packed.fp12 import (
    LARGEST_EXPONENT,
    pack_fp12,
    row_exponents,
)
from loramux.adapters.packed.paged import fp12_elements, uses_fp12
from loramux.adapters.values import bits_of, magnitudes
from loramux.kernels.reference.fp12 import unpack_fp12


def random_rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator).clamp(-1.9, 1.9).to(torch.bfloat16)


@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(1, 33), blocks=st.integers(1, 5), seed=st.integers(0, 99))
def test_unpacking_reverses_packing(num_rows: int, blocks: int, seed: int) -> None:
    """Values of at least 2^-14 are exact, smaller ones within 2^-22, missing rows are zero."""
    rows = random_rows(num_rows, blocks * 128, seed)
    words = pack_fp12(rows)
    assert words.dtype == torch.int32
    assert words.numel() * 2 == fp12_elements(num_rows, blocks * 128)
    found = unpack_fp12(words)
    error = (found[:num_rows] - rows.float()).abs()
    assert error[rows.abs() >= 2.0**-14].sum() == 0
    assert error.max() <= 2.0**-22
    assert not found[num_rows:].any()


@pytest.mark.parametrize(
    "value", [0.0, 1.0, -1.0, 1.9921875, -1.9921875, 2.0**-14, -(2.0**-14), 2.0**-21, 2.0**-20 * 3]
)
def test_values_that_fp12_represents(value: float) -> None:
    rows = torch.zeros(3, 128, dtype=torch.bfloat16)
    rows[1, 77] = value
    assert torch.equal(unpack_fp12(pack_fp12(rows))[:3], rows.float())


def test_subnormals_are_rounded_to_the_nearest() -> None:
    step = 2.0**-21
    rows = torch.zeros(1, 128)
    rows[0, :4] = torch.tensor([0.49, 0.51, -1.75, 127.75]) * step
    found = unpack_fp12(pack_fp12(rows.to(torch.bfloat16)))[0, :4] / step
    assert found.tolist() == [0.0, 1.0, -2.0, 128.0]


def test_no_two_values_share_a_bit() -> None:
    """Each row alone: all other rows stay zero."""
    for row in range(8):
        rows = torch.zeros(8, 128, dtype=torch.bfloat16)
        rows[row] = random_rows(1, 128, row)[0]
        assert torch.equal(unpack_fp12(pack_fp12(rows)).abs() > 0, rows.float().abs() >= 2.0**-22)


@given(exponent=st.integers(-70, 70))
def test_a_row_is_scaled_by_its_largest_value(exponent: int) -> None:
    rows = torch.ldexp(torch.tensor([[1.5, -0.1], [0.0, 0.0], [-1.0, 1.0]]), torch.tensor(exponent))
    found = row_exponents(magnitudes(bits_of(rows.bfloat16())).max(axis=1)).tolist()
    expected = max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, exponent))
    assert found == [expected, 0, expected]


@pytest.mark.parametrize(
    ("widths", "dtype", "page", "expected"),
    [
        ((4096, 14336), torch.bfloat16, 1 << 20, True),
        ((4096, 14336), torch.float16, 1 << 20, False),
        ((4096, 14336), torch.float32, 1 << 20, False),
        ((576, 1536), torch.bfloat16, 1 << 20, False),
        ((4096, 14336), torch.bfloat16, 12 * 14336 - 1, False),
        ((4096, 14336), torch.bfloat16, 12 * 14336, True),
    ],
    ids=["8b", "float16", "float32", "no blocks", "small pages", "just large enough"],
)
def test_which_bases_use_fp12(
    widths: tuple[int, ...], dtype: torch.dtype, page: int, expected: bool
) -> None:
    assert uses_fp12(widths, dtype, page) is expected
