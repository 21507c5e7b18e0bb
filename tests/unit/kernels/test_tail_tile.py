from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.reference import elementwise as fused_torch
from loramux.kernels.reference import lora_augmented as augmented_reference
from tests.augmented_factory import LONG_TILE, TILE, make_augmented_world, two_programs  # noqa: E402
from tests.lora_factory import Selection, random_rows  # noqa: E402

O_PROJ, GATE_UP = 1, 2
each_order = pytest.mark.parametrize("is_early", [True, False], ids=["B first", "y first"])


@each_order
def test_more_tiles_than_programs(is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loop that stops early: two programs, and a tile for every row.

    Adapter 2 has two groups of ranks, which only a program's second tile has.
    """
    names = ("gate_proj", "up_proj")
    ranks = (2, 2, 20)
    world = make_augmented_world(
        [dict.fromkeys(names, rank) for rank in ranks], augmented_reference
    )
    rows: list[Selection] = [((slot, 1.0),) for slot in (0, 1, 2, 0, 2)]
    world.step(rows, TILE)
    two_programs(monkeypatch, is_early=is_early)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.product(x, 1, GATE_UP)
    actual = augmented_gpu.activate_mul(y, "silu", world.at(1, GATE_UP, TILE))
    expected = fused_torch.activate_mul(world.expected(x, rows, 1, GATE_UP), "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@each_order
@pytest.mark.parametrize("num_parts", [1, 2])
def test_more_tiles_than_programs_that_expand(
    num_parts: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with a base row between them."""
    world = make_augmented_world([{"o_proj": 2}, {"o_proj": 20}], augmented_reference)
    rows: list[Selection] = [((0, 1.0),), (), ((1, 1.0),), ((0, 1.0),), ((1, 1.0),)]
    world.step(rows, TILE)
    two_programs(monkeypatch, is_early=is_early)
    x, _ = random_rows(len(rows), O_PROJ)
    y = world.parts(x, 1, O_PROJ, num_parts) if num_parts > 1 else world.product(x, 1, O_PROJ)
    actual = augmented_gpu.expand(y, world.at(1, O_PROJ, TILE))
    expected = world.expected(x, rows, 1, O_PROJ)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_long_tiles_with_and_without_followers() -> None:
    """20 rows of one group, 20 of two: the second 16 rows of a tile find the same B."""
    names = ("gate_proj", "up_proj")
    world = make_augmented_world([dict.fromkeys(names, 5), {"gate_proj": 20}], augmented_reference)
    rows: list[Selection] = [((0, 1.0),)] * 20 + [((1, 0.5),)] * 20 + [()] * 18
    world.step(rows, LONG_TILE)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.product(x, 0, GATE_UP)
    actual = augmented_gpu.activate_mul(y, "silu", world.at(0, GATE_UP, LONG_TILE))
    expected = fused_torch.activate_mul(world.expected(x, rows, 0, GATE_UP), "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
