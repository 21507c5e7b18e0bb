from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels import fused_torch, tail_torch, tail_triton  # noqa: E402
from loramux.kernels.fused_torch import KVTarget, Rotation  # noqa: E402
from loramux.kernels.interface import PagedLayout  # noqa: E402
from loramux.kernels.tail_tables import TailSite  # noqa: E402
from tests.attention_factory import random_angles  # noqa: E402
from tests.lora_factory import NUM_LAYERS, Selection, random_rows  # noqa: E402
from tests.tail_factory import TILE, make_tail_world  # noqa: E402

QKV, O_PROJ, GATE_UP = range(3)
each_order = pytest.mark.parametrize("is_early", [True, False], ids=["B first", "y first"])


def two_programs(monkeypatch: pytest.MonkeyPatch, is_early: bool) -> None:
    """As behind a product of few rows, or of many."""
    monkeypatch.setattr(TailSite, "max_tiles", lambda *_: 2)
    monkeypatch.setattr(tail_triton, "_reads_b_early", lambda _: is_early)


@each_order
def test_more_tiles_than_programs(is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loop that stops early: two programs, and a tile for every row."""
    names = ("gate_proj", "up_proj")
    world = make_tail_world([dict.fromkeys(names, 2)] * 3, tail_torch)
    rows: list[Selection] = [((slot, 1.0),) for slot in (0, 1, 2, 0, 2)]
    world.step(rows, TILE)
    two_programs(monkeypatch, is_early)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.product(x, 1, GATE_UP)
    actual = tail_triton.activate_mul(y, "silu", world.at(1, GATE_UP, TILE))
    expected = fused_torch.activate_mul(world.expected(x, rows, 1, GATE_UP), "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@each_order
@pytest.mark.parametrize("num_parts", [1, 2])
def test_more_tiles_than_programs_that_expand(
    num_parts: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with a base row between them."""
    world = make_tail_world([{"o_proj": 2}] * 2, tail_torch)
    rows: list[Selection] = [((0, 1.0),), ((1, 1.0),), (), ((1, 1.0),), ((0, 1.0),)]
    world.step(rows, TILE)
    two_programs(monkeypatch, is_early)
    x, _ = random_rows(len(rows), O_PROJ)
    y = world.parts(x, 1, O_PROJ, num_parts) if num_parts > 1 else world.product(x, 1, O_PROJ)
    actual = tail_triton.expand(y, world.at(1, O_PROJ, TILE))
    expected = world.expected(x, rows, 1, O_PROJ)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@each_order
def test_more_tiles_than_programs_that_rotate(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are rotated in place, keys and values go to their pages."""
    names = ("q_proj", "k_proj", "v_proj")
    world = make_tail_world([dict.fromkeys(names, 2)] * 2, tail_torch)
    rows: list[Selection] = [((0, 1.0),), ((1, 1.0),), (), ((1, 1.0),), ((0, 1.0),)]
    world.step(rows, TILE)
    two_programs(monkeypatch, is_early)
    layout = PagedLayout(NUM_LAYERS, num_kv_heads=1, head_dim=16, block_tokens=4)
    rotation = Rotation(*random_angles(len(rows), head_dim=16))
    slots = torch.tensor([3, 5, -1, 9, 1], dtype=torch.int32)
    storage = torch.randn(4, NUM_LAYERS * 2 * 4 * 16)
    found, known = (KVTarget(storage.clone(), slots, layout, 1) for _ in range(2))
    x, _ = random_rows(len(rows), QKV)
    y = world.product(x, 1, QKV)
    actual = tail_triton.rotate_write(y, rotation, found, world.at(1, QKV, TILE))
    expected = fused_torch.rotate_write(world.expected(x, rows, 1, QKV), rotation, known)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.storage, known.storage, atol=1e-4, rtol=1e-4)
