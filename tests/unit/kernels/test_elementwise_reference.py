"""The reference of the fused operations, against the modules that they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loramux.kernels.ops import ACTIVATIONS, KVTarget, Norm, Rotation, SequenceRows
from loramux.kernels.reference import attention as attention_torch
from loramux.kernels.reference import elementwise as fused_torch
from loramux.models.layers import HeadNorm, RMSNorm, Rotary, rotate_
from loramux.models.rope import RopeConfig
from loramux.types.kv import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=4)


def rms_norm(size: int) -> RMSNorm:
    module = RMSNorm(size, eps=1e-5, dtype=torch.float32)
    module.weight.copy_(torch.randn(size))
    return module


def test_add_norm_is_the_sum_and_its_norm() -> None:
    module, x, residual = rms_norm(24), torch.randn(3, 24), torch.randn(3, 24)
    expected = residual + x
    normed = fused_torch.add_norm(x, residual, Norm(module.weight, 1e-5))
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(normed, module(expected))


def test_add_norm_norms_what_it_adds_in_sandwich_models() -> None:
    module, after = rms_norm(24), rms_norm(24)
    x, residual = torch.randn(3, 24), torch.randn(3, 24)
    expected = residual + after(x)
    fused_torch.add_norm(x, residual, Norm(module.weight, 1e-5), Norm(after.weight, 1e-5))
    torch.testing.assert_close(residual, expected)


def test_add_norm_without_a_sum_leaves_the_residual() -> None:
    module, residual = rms_norm(24), torch.randn(3, 24)
    before = residual.clone()
    normed = fused_torch.add_norm(None, residual, Norm(module.weight, 1e-5))
    assert torch.equal(residual, before)
    torch.testing.assert_close(normed, module(before))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_the_decoder(activation: str) -> None:
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    gate_up = torch.randn(3, 40)
    gate, up = gate_up.chunk(2, -1)
    expected = functions[activation](gate) * up
    torch.testing.assert_close(fused_torch.activate_mul(gate_up, activation), expected)


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_write_rotates_and_stores_as_the_decoder_does(has_norm: bool) -> None:
    num_rows, num_heads, dim = 5, 6, LAYOUT.head_dim
    rotary = Rotary(RopeConfig(), dim)
    head_norm = HeadNorm(num_heads + 2, dim, eps=1e-6, dtype=torch.float32)
    head_norm.weight.copy_(torch.randn(num_heads + 2, dim))
    positions = torch.arange(2, 2 + num_rows)
    qkv = torch.randn(num_rows, num_heads + 4, dim)
    qk = head_norm(qkv[:, :-2].clone()) if has_norm else qkv[:, :-2].clone()
    qk = rotate_(qk, *rotary(positions, torch.float32))
    plan = attention_torch.plan([SequenceRows(0, num_rows, 2, [3, 1])], LAYOUT, torch.device("cpu"))
    expected = torch.zeros(4, 2 * 2 * 4 * 2 * dim)
    plan.write_kv(expected, 1, qk[:, num_heads:], qkv[:, -2:])

    cos, sin = fused_torch.rotation(positions.int(), rotary.frequencies, rotary.signs)
    norm = Norm(head_norm.weight, 1e-6) if has_norm else None
    slots = torch.tensor([3 * 4 + 2, 3 * 4 + 3, 4, 5, 6], dtype=torch.int32)
    target = KVTarget(torch.zeros_like(expected), slots, LAYOUT, 1)
    q = fused_torch.rotate_write(qkv.flatten(1), Rotation(cos, sin, norm), target)
    torch.testing.assert_close(q, qk[:, :num_heads])
    torch.testing.assert_close(target.storage, expected)
