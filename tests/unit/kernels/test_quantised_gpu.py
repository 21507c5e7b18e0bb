"""GEMMs over quantised weights, in Triton's interpreter or on a GPU, against torch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.gemm import quantised  # noqa: E402
from loramux.kernels.quantised_ops import EightBitWeight, FourBitWeight  # noqa: E402
from loramux.kernels.reference import quantised as reference  # noqa: E402

IMPLEMENTATIONS = [quantised, reference]
# Tensor cores align the products of FP8 numbers to 13 bits.
LIMIT = 5e-6 if not torch.cuda.is_available() else 1e-3


def eight_bit(outputs: int, inputs: int, group: int | None) -> EightBitWeight:
    weight = torch.randn(outputs, inputs) / inputs**0.5
    if group is None:
        scales = weight.abs().amax(dim=1, keepdim=True) / 448
        return EightBitWeight((weight / scales).to(torch.float8_e4m3fn), scales, inputs)
    scales = torch.rand(outputs, -(-inputs // group)) * 1e-3 + 1e-4
    codes = torch.randn(outputs, inputs) * 100
    return EightBitWeight(codes.clamp(-448, 448).to(torch.float8_e4m3fn), scales, group)


def four_bit(outputs: int, inputs: int, group: int) -> FourBitWeight:
    codes = torch.randint(0, 16, (outputs, inputs))
    scales = torch.rand(outputs, inputs // group) * 0.01
    zeros = torch.randint(0, 16, (outputs, inputs // group))
    return FourBitWeight.pack(codes, scales, zeros, group)


def exact(x: Tensor, weight: EightBitWeight | FourBitWeight) -> Tensor:
    return x.double() @ weight.dequantised().double().t()


def values(coded: quantised.CodedRows) -> Tensor:
    found = sum(codes.double() / 16**term for term, codes in enumerate(coded.codes))
    return found * coded.scales.double()[:, None]


@pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=lambda ops: ops.__name__.split(".")[2])
@pytest.mark.parametrize(("terms", "limit"), [(1, 2**-4), (2, 2**-8)])
def test_codes_of_rows_are_near_them(ops: ModuleType, terms: int, limit: float) -> None:
    x = torch.randn(5, 200) * torch.tensor([1e-3, 1.0, 300.0, 0.0, 1.0])[:, None]
    x[4, 3] = float("inf")
    coded = ops.quantise_rows(x, terms=terms)
    largest = x[:3].abs().amax(dim=1, keepdim=True).double()
    assert ((values(coded)[:3] - x[:3].double()).abs() <= limit * largest).all()
    assert (values(coded)[3] == 0).all()
    assert coded.scales[4].isnan()


@pytest.mark.parametrize("terms", [1, 2])
def test_codes_equal_those_of_torch(terms: int) -> None:
    x = torch.randn(7, 384)
    mine, theirs = (ops.quantise_rows(x, terms=terms, group=128) for ops in IMPLEMENTATIONS)
    assert torch.equal(mine.codes.float(), theirs.codes.float())
    torch.testing.assert_close(mine.scales, theirs.scales, atol=0, rtol=1e-6)
    torch.testing.assert_close(mine.sums, theirs.sums, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=lambda ops: ops.__name__.split(".")[2])
@pytest.mark.parametrize("num_rows", [1, 3, 17, 40])
@pytest.mark.parametrize(
    ("shape", "group"), [((70, 200), None), ((64, 256), 128), ((33, 300), 128)]
)
@pytest.mark.parametrize("terms", [1, 2])
def test_eight_bit_gemm(
    ops: ModuleType, num_rows: int, shape: tuple[int, int], group: int | None, terms: int
) -> None:
    weight = eight_bit(*shape, group)
    coded = ops.quantise_rows(torch.randn(num_rows, shape[1]), terms=terms)
    room = torch.full((num_rows + 1, shape[0]), 7.0)
    ops.multiply_eight_bit(coded, weight, room[:num_rows])
    expected = exact(values(coded), weight)
    torch.testing.assert_close(room[:num_rows].double(), expected, atol=LIMIT, rtol=LIMIT)
    assert (room[num_rows:] == 7.0).all()


@pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=lambda ops: ops.__name__.split(".")[2])
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_four_bit_gemm(ops: ModuleType, num_splits: int, num_rows: int) -> None:
    weight = four_bit(70, 512, 128)
    coded = ops.quantise_rows(torch.randn(num_rows, 512), terms=2, group=128)
    y = torch.empty(num_splits, num_rows, 70)
    ops.multiply_four_bit(coded, weight, y if num_splits > 1 else y[0])
    expected = exact(values(coded), weight)
    torch.testing.assert_close(y.sum(dim=0).double(), expected, atol=20 * LIMIT, rtol=LIMIT)


@pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=lambda ops: ops.__name__.split(".")[2])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(
    ("shape", "group"), [((70, 200), None), ((8, 4096), None), ((6, 300), 128)]
)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_vectors(
    ops: ModuleType, rounds: bool, shape: tuple[int, int], group: int | None, num_rows: int
) -> None:
    weight = eight_bit(*shape, group)
    x = torch.randn(num_rows, shape[1])
    y = torch.empty(num_rows, shape[0])
    ops.multiply_vectors(x, weight, y, rounds=rounds)
    used = values(ops.quantise_rows(x, terms=1)) if rounds else x
    torch.testing.assert_close(y.double(), exact(used, weight), atol=5e-6, rtol=5e-6)


def test_partial_sums_of_splits() -> None:
    weight = eight_bit(64, 256, None)
    coded = quantised.quantise_rows(torch.randn(3, 256), terms=1)
    sums = torch.empty(2, 3, 64)
    quantised.multiply_eight_bit(coded, weight, sums)
    expected = exact(values(coded), weight)
    torch.testing.assert_close(sums.sum(dim=0).double(), expected, atol=LIMIT, rtol=LIMIT)


def test_four_bit_weights_are_unpacked() -> None:
    codes = torch.randint(0, 16, (6, 128))
    scales, zeros = torch.rand(6, 4).half(), torch.randint(0, 16, (6, 4))
    weight = FourBitWeight.pack(codes, scales, zeros, 32)
    expected = (codes.view(6, 4, 32) - zeros[..., None]) * scales.float()[..., None]
    assert torch.equal(weight.dequantised(), expected.view(6, 128))
    assert torch.equal(weight.dequantised(slice(2, 5)), expected.view(6, 128)[2:5])


@pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=lambda ops: ops.__name__.split(".")[2])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (eight_bit, (5, 200, None)),
        (eight_bit, (5, 300, 128)),
        (four_bit, (5, 512, 128)),
        (four_bit, (6, 128, 32)),
    ],
    ids=["rows", "groups", "int4", "int4 in groups of 32"],
)
def test_weights_are_dequantised(
    ops: ModuleType, make: Callable[..., EightBitWeight | FourBitWeight], shape: tuple[int, ...]
) -> None:
    weight = make(*shape)
    expected = weight.dequantised()
    out = torch.empty_like(expected)
    ops.dequantise(weight, out)
    torch.testing.assert_close(out, expected, atol=0, rtol=1e-6)
