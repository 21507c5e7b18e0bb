"""Linears over 4-bit weights against GEMMs with their dequantised weight."""

from __future__ import annotations

import pytest
import torch

from loramux.kernels.reference import quantised
from loramux.models.four_bit_linear import FourBitLinear
from loramux.types.model import LinearSpec

GROUP = 32


def filled(*, has_bias: bool) -> tuple[FourBitLinear, torch.Tensor]:
    spec = LinearSpec(
        name="qkv",
        in_features=256,
        projections=("q_proj", "k_proj"),
        out_features=(32, 16),
        has_bias=has_bias,
    )
    linear = FourBitLinear(spec, quantised, group=GROUP, dtype=torch.float32, device="cpu")
    weights = []
    for projection in spec.members:
        for name, slot in linear.slots(projection).items():
            shape = (projection.out_features, 256)
            tensor = torch.randn(shape if name == "weight" else shape[:1])
            slot.fill(name, tensor)
            if name == "weight":
                weights.append(tensor)
    return linear, torch.cat(weights)


def test_weights_are_rounded_within_their_group() -> None:
    linear, expected = filled(has_bias=False)
    groups = expected.view(48, -1, GROUP)
    span = groups.amax(dim=2).clamp(min=0) - groups.amin(dim=2).clamp(max=0)
    error = (linear.dequantised_rows() - expected).abs().view(groups.shape)
    assert (error <= span[..., None] / 15 * 1.01).all()
    assert torch.equal(linear.dequantised_rows(slice(30, 35)), linear.dequantised_rows()[30:35])
    assert linear.num_bytes == 48 * 128 + 48 * 8 * 4


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 70])
def test_gemms_keep_eight_bits_of_inputs(num_rows: int, has_bias: bool) -> None:
    linear, _ = filled(has_bias=has_bias)
    x = torch.randn(num_rows, 256)
    expected = x.double() @ linear.dequantised_rows().double().t()
    if linear.bias is not None:
        expected += linear.bias.double()
    limit = 1e-4 if num_rows > 64 else 0.1
    torch.testing.assert_close(linear(x).double(), expected, atol=limit, rtol=limit)
    sums = linear.partial_sums(x)
    assert sums.ndim == (3 if num_rows <= 64 and not has_bias else 2)
    total = sums.sum(dim=0) if sums.ndim == 3 else sums
    torch.testing.assert_close(total, linear(x), atol=1e-4, rtol=1e-4)


def test_groups_that_no_kernel_takes_are_named() -> None:
    spec = LinearSpec(name="o", in_features=192, projections=("o_proj",), out_features=(8,))
    assert FourBitLinear.supports(spec, 32)
    assert not FourBitLinear.supports(spec, 128)
    assert not FourBitLinear.supports(spec, 16)
