from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.lora.mma_layout import order_columns, order_rows  # noqa: E402
from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.gpu.lora_augmented.rotary_tiles import norm_halves  # noqa: E402
from loramux.kernels.ops import (  # noqa: E402
    KVTarget,
    PagedLayout,  # noqa: E402
    Rotation,
)
from loramux.kernels.reference import elementwise as fused_torch
from loramux.kernels.reference import lora_augmented as augmented_reference
from tests.attention_factory import random_angles  # noqa: E402
from tests.augmented_factory import TILE, make_augmented_world, two_programs  # noqa: E402
from tests.lora_factory import NUM_LAYERS, Selection, random_rows  # noqa: E402

QKV = 0
each_order = pytest.mark.parametrize("is_early", [True, False], ids=["B first", "y first"])


@each_order
def test_more_tiles_than_programs_that_rotate(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are rotated in place, keys and values go to their pages.

    Adapter 1 has two groups of ranks, which only a program's second tile has.
    """
    names = ("q_proj", "k_proj", "v_proj")
    world = make_augmented_world(
        [dict.fromkeys(names, 2), dict.fromkeys(names, 20)], augmented_reference
    )
    rows: list[Selection] = [((0, 1.0),), (), ((1, 1.0),), ((0, 1.0),), ((1, 1.0),)]
    world.step(rows, TILE)
    two_programs(monkeypatch, is_early=is_early)
    layout = PagedLayout(NUM_LAYERS, num_kv_heads=1, head_dim=16, block_tokens=4)
    rotation = Rotation(*random_angles(len(rows), head_dim=16))
    slots = torch.tensor([3, 5, -1, 9, 1], dtype=torch.int32)
    storage = torch.randn(4, NUM_LAYERS * 2 * 4 * 16)
    found, known = (KVTarget(storage.clone(), slots, layout, 1) for _ in range(2))
    x, _ = random_rows(len(rows), QKV)
    y = world.product(x, 1, QKV)
    actual = augmented_gpu.rotate_write(y, rotation, found, world.at(1, QKV, TILE))
    expected = fused_torch.rotate_write(world.expected(x, rows, 1, QKV), rotation, known)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.storage, known.storage, atol=1e-4, rtol=1e-4)


@triton.jit
def _norm(y, weight, out, HEAD_DIM: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr):
    column = order_columns(WARPS, J)
    at = order_rows() * HEAD_DIM + column
    halves = norm_halves(
        tl.load(y + at), tl.load(y + at + HEAD_DIM // 2), weight + column, 1e-5, column >= 0,
        HEAD_DIM,
    )  # fmt: skip
    tl.store(out + at, halves[0])
    tl.store(out + at + HEAD_DIM // 2, halves[1])


@pytest.mark.usefixtures("both_orders")
@pytest.mark.parametrize("num_warps", [1, 2])
def test_a_head_is_normed_whole_if_warps_share_it(num_warps: int) -> None:
    per_lane = 4
    size = 2 * num_warps * 8 * per_lane
    y, weight = torch.randn(16, size), torch.randn(size)
    out = torch.empty_like(y)
    _norm[(1,)](y, weight, out, size, num_warps, per_lane, num_warps=num_warps)
    expected = y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
