"""The elementwise kernels in Triton's interpreter or on a GPU, against the reference."""

from __future__ import annotations

from operator import itemgetter

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu import elementwise as fused_triton
from loramux.kernels.ops import (  # noqa: E402
    ACTIVATIONS,
    KVLayout,  # noqa: E402
    KVTarget,
    Norm,
    Rotation,
)
from loramux.kernels.reference import elementwise as fused_torch
from tests.attention_factory import random_angles  # noqa: E402

LIMITS = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-4},
    torch.float16: {"atol": 4e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 4e-2, "rtol": 1e-2},
}
SIZES = [48, 64]
"""One of them is no power of two."""


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["norm", "add", "sandwich"])
def test_add_norm_equals_the_reference(kind: str, size: int, dtype: torch.dtype) -> None:
    x = None if kind == "norm" else torch.randn(3, size, dtype=dtype)
    after = Norm(torch.randn(size), 1e-4) if kind == "sandwich" else None
    norm, residual = Norm(torch.randn(size, dtype=dtype), 1e-5), torch.randn(3, size, dtype=dtype)
    reference_residual = residual.clone()
    fused_torch.add_norm(x, reference_residual, norm, after)
    actual = fused_triton.add_norm(x, residual, norm, after)
    torch.testing.assert_close(residual, reference_residual, **LIMITS[dtype])
    assert_normed(actual, residual, norm)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("num_parts", [2, 7])
@pytest.mark.parametrize("kind", ["add", "sandwich"])
def test_add_norm_adds_parts_up(kind: str, num_parts: int, dtype: torch.dtype) -> None:
    """Some columns stand behind those that are normed: a tail that a step does not use."""
    size = 48
    parts = torch.randn(num_parts, 3, size + 16)[..., :size]
    after = Norm(torch.randn(size), 1e-4) if kind == "sandwich" else None
    norm, residual = Norm(torch.randn(size, dtype=dtype), 1e-5), torch.randn(3, size, dtype=dtype)
    reference_residual, whole_residual = residual.clone(), residual.clone()
    whole = fused_torch.add_norm(parts.sum(0).to(dtype), whole_residual, norm, after)
    expected = fused_torch.add_norm(parts, reference_residual, norm, after)
    assert torch.equal(expected, whole) and torch.equal(reference_residual, whole_residual)
    actual = fused_triton.add_norm(parts, residual, norm, after)
    # Rounded twice, the parts' sum and the residual's: added in another order, either may go the
    # other way.
    limits = {**LIMITS[dtype], "rtol": max(LIMITS[dtype]["rtol"], 2.01 * torch.finfo(dtype).eps)}
    torch.testing.assert_close(residual, reference_residual, **limits)
    assert_normed(actual, residual, norm)


def assert_normed(actual: torch.Tensor, residual: torch.Tensor, norm: Norm) -> None:
    """Norms the stored residual: where that is rounded otherwise, norms may be far apart."""
    expected = fused_torch.add_norm(None, residual, norm)
    torch.testing.assert_close(actual, expected, **LIMITS[actual.dtype])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_mul_equals_the_reference(activation: str, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 48, dtype=dtype)
    actual = fused_triton.activate_mul(gate_up, activation)
    expected = fused_torch.activate_mul(gate_up, activation)
    torch.testing.assert_close(actual, expected, **LIMITS[dtype])


@pytest.mark.parametrize("num_rows", [1, 64], ids=["few rows", "many rows"])
@pytest.mark.parametrize("inner", [2048, 2100], ids=["whole blocks", "a part of one"])
def test_activate_mul_of_more_than_a_block(inner: int, num_rows: int) -> None:
    gate_up = torch.randn(num_rows, 2 * inner)
    actual = fused_triton.activate_mul(gate_up, "silu")
    expected = fused_torch.activate_mul(gate_up, "silu")
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])


# Against float64. The argument of a large exponential is rounded, so values near zero are less
# exact; a GPU may flush denormals to zero.
@pytest.mark.parametrize(
    ("activation", "least", "rtol"),
    [
        ("silu", -30.0, 2e-6),
        ("silu", -87.0, 5e-6),
        ("gelu_pytorch_tanh", -3.0, 2e-6),
        ("gelu_pytorch_tanh", -9.0, 1e-5),
    ],
)
def test_activations_are_exact_far_out(activation: str, least: float, rtol: float) -> None:
    gate = torch.linspace(least, 100.0, 20_000)
    actual = fused_triton.activate_mul(
        torch.stack((gate, torch.ones(20_000))).view(1, -1), activation
    )
    exact = power = gate.double()
    if activation != "silu":
        power = 1.5957691216057308 * (exact + 0.044715 * exact**3)
    torch.testing.assert_close(
        actual[0].double(), exact * torch.sigmoid(power), atol=1e-37, rtol=rtol
    )


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_activations_of_huge_numbers_are_numbers(activation: str) -> None:
    """Catches infinity times zero."""
    gate = [-3e38, -1e30, -100.0, -0.0, 0.0, 1e30, 3e38]
    gate_up = torch.tensor([gate + [1.0] * len(gate)])
    actual = fused_triton.activate_mul(gate_up, activation)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1e30, 3e38]])
    torch.testing.assert_close(actual, expected, atol=1e-40, rtol=1e-6)


def test_rotation_equals_the_reference_far_out() -> None:
    positions = torch.tensor([0, 1, 131_000], dtype=torch.int32)
    frequencies, signs = torch.rand(48), torch.randn(48)
    actual = fused_triton.rotation(positions, frequencies, signs)
    expected = fused_torch.rotation(positions, frequencies, signs)
    torch.testing.assert_close(torch.stack(actual), torch.stack(expected))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, torch.float16], ids=str)
def test_rotate_write_equals_the_reference(
    kv_dtype: torch.dtype | None, has_norm: bool, head_dim: int, dtype: torch.dtype
) -> None:
    """The second row has no slot: padding must not be stored."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=head_dim, block_tokens=4)
    norm = Norm(torch.randn(5, head_dim), 1e-6) if has_norm else None
    cos, sin = random_angles(3, head_dim)
    slots = torch.tensor([7, -1, 13], dtype=torch.int32)
    qkv = torch.randn(3, 7 * head_dim).to(dtype)
    storage = torch.randn(4, 2 * 2 * 4 * 2 * head_dim).to(kv_dtype or dtype)
    outs = []
    for kernels in (fused_torch, fused_triton):
        target = KVTarget(storage.clone(), slots, layout, 1)
        q = kernels.rotate_write(qkv.clone(), Rotation(cos, sin, norm), target)
        outs.append((q, target.storage))
    torch.testing.assert_close(outs[1][0], outs[0][0], **LIMITS[dtype])
    limits = max(LIMITS[dtype], LIMITS[kv_dtype or dtype], key=itemgetter("atol"))
    torch.testing.assert_close(outs[1][1], outs[0][1], **limits)
