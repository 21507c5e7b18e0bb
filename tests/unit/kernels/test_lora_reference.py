"""The reference implementations of LoRA, against dense float64: popularity x ranks x weights."""

from __future__ import annotations

import pytest
import torch

from loramux.kernels.ops import LoraSlice, LoraWeights, Segment
from loramux.kernels.reference import lora, lora_segmented
from tests.lora_factory import NUM_LAYERS, SITES, LoraWorld, Selection, make_world, random_rows

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")

# Rows per adapter, and the number of base rows behind them.
POPULARITIES: dict[str, tuple[list[int], int]] = {
    "distinct": ([1] * 6, 0),
    "identical": ([20], 0),
    "uniform": ([3] * 3, 2),
    "skewed": ([18, 5, 2, 1], 1),
}


def check(world: LoraWorld, rows: list[Selection]) -> None:
    world.plan(rows)
    for layer in range(NUM_LAYERS):
        for site in range(len(SITES)):
            x, y = random_rows(len(rows), site)
            expected = world.expected(y, x, rows, layer, site)
            lora_segmented.shrink(world.tables, world.pool, x, layer, site)
            lora_segmented.expand(world.tables, world.pool, y, layer, site)
            torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [1, 16, 20, 200])
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_every_mix_and_rank(rank: int, popularity: str) -> None:
    counts, num_base = POPULARITIES[popularity]
    rows: list[Selection] = [((slot, 1.0),) for slot, n in enumerate(counts) for _ in range(n)]
    world = make_world([dict.fromkeys(ALL, rank)] * len(counts))
    check(world, rows + [()] * num_base)


def test_adapters_that_do_not_change_some_projections_and_layers() -> None:
    world = make_world(
        [{"q_proj": 3}, {"k_proj": 20, "up_proj": 1}, dict.fromkeys(ALL, 4)], skip=[(2, 1)]
    )
    check(world, [((0, 1.0),), ((1, 1.0),), ((2, 1.0),), ((2, 1.0),)])


def test_several_weighted_adapters_on_one_row_add_up() -> None:
    world = make_world([dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 17), {"v_proj": 2}])
    pair = ((0, 0.5), (1, -2.0))
    check(world, [pair, pair, ((1, 1.0),), (), ((2, 3.0), (0, 1.0))])


def test_base_rows_keep_their_bits() -> None:
    world = make_world([dict.fromkeys(ALL, 3)])
    rows: list[Selection] = [(), ((0, 1.0),), ()]
    world.plan(rows)
    x, y = random_rows(len(rows), site=0)
    before = y.clone()
    lora_segmented.shrink(world.tables, world.pool, x, 0, 0)
    lora_segmented.expand(world.tables, world.pool, y, 0, 0)
    assert torch.equal(y[[0, 2]], before[[0, 2]])
    assert not torch.equal(y, before)


def test_each_slice_adds_to_its_own_columns_with_its_own_rank() -> None:
    a = torch.randn(2, 4, 3)
    q, v = torch.randn(2, 2, 5), torch.randn(2, 1, 3)
    weights = LoraWeights(a=a, slices=(LoraSlice(q, 0, 0), LoraSlice(v, 2, 7)))
    x, y = torch.randn(6, 4), torch.zeros(6, 10)
    lora.add_lora(y, x, weights, lora.cut_rows([Segment(1, 2, 5, 0.5)], 2))
    torch.testing.assert_close(y[2:5, :5], 0.5 * x[2:5] @ a[1, :, :2] @ q[1])
    torch.testing.assert_close(y[2:5, 7:], 0.5 * x[2:5] @ a[1, :, 2:] @ v[1])
    assert not y[:, 5:7].any()
    assert not y[[0, 1, 5]].any()
