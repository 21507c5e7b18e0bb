from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.lora_factory import SITES, Selection, make_world, random_rows

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels import lora_grouped_torch, lora_triton  # noqa: E402

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
PAIR = ((0, 0.5), (1, -2.0))
ROWS: list[Selection] = [((0, 1.0),), ((1, 1.0),), ((1, 1.0),), (), PAIR]
# Adapter 0 has rank 3 and one block of the tail, adapter 1 has rank 18 and two, in no order.
TAIL_BLOCKS = [[2, 0], [1, 0]]
NUM_BLOCKS = 3


@pytest.mark.parametrize("kernels", [lora_grouped_torch, lora_triton], ids=["torch", "triton"])
def test_h_from_the_tail_of_the_base_product(kernels: ModuleType) -> None:
    """The tail's rows are the adapters' A, so one product gives y and every h."""
    world = make_world([dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 18)])
    world.plan(ROWS, tail_blocks=TAIL_BLOCKS)
    layer, site = 1, 0
    shape = SITES[site]
    x, y = random_rows(len(ROWS), site)
    tail = torch.zeros(NUM_BLOCKS, len(shape.projections), 16, shape.in_features)
    for slot, blocks in enumerate(TAIL_BLOCKS):
        for part, name in enumerate(shape.projections):
            a, _ = world.weights[slot][layer, name]
            for first in range(0, len(a), 16):
                rows = a[first : first + 16]
                tail[blocks[first // 16], part, : len(rows)] = rows
    extended = torch.cat([y, x @ tail.view(-1, shape.in_features).t()], dim=1)
    expected = world.expected(y, x, ROWS, layer, site)
    kernels.expand_tail(world.tables, world.pool, extended, layer, site)
    actual = extended[:, : sum(shape.out_features)].double()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
