from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.lora_factory import LIMITS, Selection, make_world, random_rows

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora import segmented as lora_triton
from loramux.kernels.reference import lora_segmented

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
PAIR = ((0, 0.5), (1, -2.0))
ROWS: list[Selection] = [((0, 1.0),), ((1, 1.0),), ((1, 1.0),), (), PAIR]


@pytest.mark.parametrize("alone_rows", [1, 4, 0], ids=["tiles", "few rows", "prompt"])
def test_sums_of_the_same_parts_equal_the_reference(alone_rows: int) -> None:
    """Catches a part that is added twice, or to another slice's columns."""
    limits = replace(LIMITS, alone_rows=alone_rows)
    world = make_world([dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 18)], limits=limits)
    world.plan(ROWS)
    x, y = random_rows(len(ROWS), site=0)
    lora_segmented.shrink(world.tables, world.pool, x, 1, 0)
    found = {}
    for kernels in (lora_segmented, lora_triton):
        found[kernels] = y.clone()
        kernels.expand(world.tables, world.pool, found[kernels], 1, 0)
    expected = found[lora_segmented]
    torch.testing.assert_close(found[lora_triton], expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(expected, y)
