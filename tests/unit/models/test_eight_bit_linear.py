"""Linears over FP8 weights against GEMMs with their dequantised weight."""

from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference import quantised
from loramux.models.eight_bit_linear import EightBitLinear
from loramux.types.model import LinearSpec, RowMap

SWAP = RowMap(num_heads=2, head_order=tuple(reversed(range(16))))
SPEC = LinearSpec(
    name="qkv",
    in_features=64,
    projections=("q_proj", "k_proj"),
    out_features=(32, 16),
    has_bias=True,
    row_maps=(SWAP, None),
)


def filled(*, rounds_inputs: bool) -> tuple[EightBitLinear, dict[str, torch.Tensor]]:
    linear = EightBitLinear(
        SPEC, quantised, dtype=torch.float32, device="cpu", rounds_inputs=rounds_inputs
    )
    tensors = {}
    for projection in SPEC.members:
        for name, slot in linear.slots(projection).items():
            shape = (projection.out_features, 64) if name == "weight" else projection.out_features
            tensor = tensors[f"{projection.name}.{name}"] = torch.randn(shape)
            slot.fill(f"{projection.name}.{name}", tensor)
    return linear, tensors


def test_rows_are_quantised_in_the_order_of_the_engine() -> None:
    linear, tensors = filled(rounds_inputs=False)
    swapped = tensors["q_proj.weight"][SWAP.rows(32)]
    expected = torch.cat((swapped, tensors["k_proj.weight"]))
    error = (linear.dequantised_rows() - expected).abs()
    # Half a step of three bits of mantissa, relative to the largest element of a row.
    assert (error <= expected.abs().amax(dim=1, keepdim=True) * 2**-4).all()
    assert torch.equal(linear.dequantised_rows(slice(3, 5)), linear.dequantised_rows()[3:5])
    assert linear.num_bytes == 48 * 64 + 48 * 4


@pytest.mark.parametrize("num_rows", [1, 2, 3, 128, 130])
def test_weight_only_gemms_are_exact(num_rows: int) -> None:
    linear, _ = filled(rounds_inputs=False)
    assert linear.bias is not None
    x = torch.randn(num_rows, 64)
    expected = x.double() @ linear.dequantised_rows().double().t() + linear.bias.double()
    # The codes of three rows and more keep eight bits of x.
    limit = 1e-5 if num_rows <= 2 or num_rows > 128 else 5e-2
    torch.testing.assert_close(linear(x).double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("num_rows", [1, 3, 129])
def test_inputs_are_rounded_alike_at_any_number_of_rows(num_rows: int) -> None:
    linear, _ = filled(rounds_inputs=True)
    x = torch.randn(num_rows, 64)
    alone = torch.cat([linear(row[None]) for row in x])
    torch.testing.assert_close(linear(x), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 4, 200])
def test_partial_sums_add_up_to_the_output(num_rows: int) -> None:
    spec = LinearSpec(name="o", in_features=512, projections=("o_proj",), out_features=(32,))
    linear = EightBitLinear(spec, quantised, dtype=torch.float32, device="cpu", rounds_inputs=True)
    (slot,) = linear.slots(spec.members[0]).values()
    slot.fill("o_proj.weight", torch.randn(32, 512))
    x = torch.randn(num_rows, 512)
    sums = linear.partial_sums(x)
    assert sums.ndim == (3 if num_rows == 4 else 2)
    total = sums.sum(dim=0) if sums.ndim == 3 else sums
    torch.testing.assert_close(total, linear(x), atol=1e-3, rtol=1e-5)


def test_a_merged_weight_is_dense() -> None:
    linear, _ = filled(rounds_inputs=True)
    weight = torch.randn(48, 64)
    x = torch.randn(3, 64)
    expected = torch.nn.functional.linear(x, weight, linear.bias)
    torch.testing.assert_close(linear.with_weight(weight)(x), expected)
