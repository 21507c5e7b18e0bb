"""The compiled operations between matrix products, against their reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba", reason="no numba on this machine")

from loramux.kernels.cpu_jit import elementwise as fused_numba
from loramux.kernels.ops import ACTIVATIONS, KVTarget, Norm, Rotation
from loramux.kernels.reference import elementwise as fused_torch
from loramux.types.kv import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=4)
HIDDEN = 40
FEW, MANY = 3, 2000
"""Rows that one thread computes, and rows that all share."""


def norm_of(*shape: int) -> Norm:
    return Norm(torch.randn(*shape), 1e-5)


@pytest.mark.parametrize("num_rows", [1, FEW, MANY])
@pytest.mark.parametrize("has_after", [False, True], ids=["", "sandwich"])
def test_add_norm_equals_the_reference(num_rows: int, has_after: bool) -> None:
    norm, after = norm_of(HIDDEN), norm_of(HIDDEN) if has_after else None
    x, residual = torch.randn(num_rows, HIDDEN), torch.randn(num_rows, HIDDEN)
    expected_residual = residual.clone()
    expected = fused_torch.add_norm(x, expected_residual, norm, after)
    actual = fused_numba.add_norm(x, residual, norm, after)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(residual, expected_residual)


def test_add_norm_without_a_sum_leaves_the_residual() -> None:
    norm, residual = norm_of(HIDDEN), torch.randn(FEW, HIDDEN)
    before = residual.clone()
    expected = fused_torch.add_norm(None, residual, norm)
    torch.testing.assert_close(fused_numba.add_norm(None, residual, norm), expected)
    assert torch.equal(residual, before)


def test_rows_with_gaps_between_them_are_summed_as_they_are() -> None:
    norm, x, residual = norm_of(HIDDEN), torch.randn(FEW, 2 * HIDDEN), torch.randn(FEW, HIDDEN)
    expected = fused_torch.add_norm(x[:, :HIDDEN], residual.clone(), norm)
    torch.testing.assert_close(fused_numba.add_norm(x[:, :HIDDEN], residual, norm), expected)


@pytest.mark.parametrize("has_norm", [False, True], ids=["", "head norm"])
def test_rotate_write_equals_the_reference(has_norm: bool) -> None:
    num_heads, num_rows = 6, 5
    qkv = torch.randn(num_rows, (num_heads + 4) * 16)
    rotation = Rotation(
        torch.randn(num_rows, 16),
        torch.randn(num_rows, 16),
        norm_of(num_heads + 2, 16) if has_norm else None,
    )
    slots = torch.tensor([3, 12, -1, 0, 9], dtype=torch.int32)
    storage = torch.randn(4, 2 * 2 * 4 * 2 * 16)
    expected_storage, expected_qkv = storage.clone(), qkv.clone()
    expected = fused_torch.rotate_write(
        expected_qkv, rotation, KVTarget(expected_storage, slots, LAYOUT, 1)
    )
    actual = fused_numba.rotate_write(qkv, rotation, KVTarget(storage, slots, LAYOUT, 1))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(storage, expected_storage)
    assert actual.data_ptr() == qkv.data_ptr()


@pytest.mark.parametrize("num_rows", [1, FEW, MANY])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_mul_equals_the_reference(activation: str, num_rows: int) -> None:
    gate_up = torch.randn(num_rows, 2 * HIDDEN) * 8
    expected = fused_torch.activate_mul(gate_up, activation)
    torch.testing.assert_close(fused_numba.activate_mul(gate_up, activation), expected)


def test_silu_of_very_large_gates_is_the_gate_or_nothing() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    mixed = fused_numba.activate_mul(gate_up, "silu")
    torch.testing.assert_close(mixed[:, 1:], torch.tensor([[0.0, 200.0, 1e30]]))
    assert torch.isfinite(mixed).all()


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    gate_up, norm = torch.randn(MANY, 2 * HIDDEN), norm_of(HIDDEN)
    alone = fused_numba.activate_mul(gate_up[:1].clone(), "silu")
    assert torch.equal(fused_numba.activate_mul(gate_up, "silu")[:1], alone)
    x, residual = gate_up[:, :HIDDEN].contiguous(), gate_up[:, HIDDEN:].contiguous()
    alone = fused_numba.add_norm(x[:1].clone(), residual[:1].clone(), norm)
    assert torch.equal(fused_numba.add_norm(x, residual, norm)[:1], alone)


_NORMS_OF_ONE_ROW = """
import numpy as np
from loramux.kernels.cpu_jit import elementwise as fused_numba

source = np.random.default_rng(0)
for size in (33, 40, 100, 200):
    x, residual, weight = source.standard_normal((3, size), np.float32)
    found = np.empty((3, 1, size), np.float32)
    eps = np.float32(1e-5)
    fused_numba._add_norm_row(x, residual.copy(), weight, eps, found[0, 0])
    fused_numba._add_norm(x[None], residual[None].copy(), weight, eps, found[1])
    behind = residual.copy()
    places = [array.ctypes.data for array in (x, behind, found[2], weight)]
    fused_numba.apply_epilogue(1, tuple(places), (size, size), (0, 1), eps)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2]), size
"""


@pytest.mark.slow
def test_results_do_not_depend_on_which_process_filled_the_cache(tmp_path: Path) -> None:
    """Two that start at once leave functions of both there; each has a copy of what it calls."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _NORMS_OF_ONE_ROW]
    subprocess.run(command, env=environment, check=True)
    kept = list(tmp_path.rglob("elementwise._add_norm_row*"))
    assert kept, "numba keeps what it compiled elsewhere"
    for path in kept:
        path.unlink()
    subprocess.run(command, env=environment, check=True)
