from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.reference import elementwise as fused_torch
from loramux.kernels.reference import lora_augmented as augmented_reference
from tests.augmented_factory import ROW, make_augmented_world  # noqa: E402
from tests.lora_factory import SITES, Selection, random_rows  # noqa: E402

GATE_UP = 2


def test_programs_share_a_row() -> None:
    """Catches columns that are counted from a program's first and not from the row's."""
    world = make_augmented_world(
        [{"gate_proj": 20, "up_proj": 3}, {"up_proj": 16}], augmented_reference
    )
    rows: list[Selection] = [((0, 1.0),), (), ((1, 2.0), (0, 0.5))]
    launch = replace(ROW, activate_n=16)
    assert SITES[GATE_UP].out_features[0] > launch.activate_n
    world.step(rows, launch)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.product(x, 0, GATE_UP)
    actual = augmented_gpu.activate_mul(y, "silu", world.at(0, GATE_UP, launch))
    expected = fused_torch.activate_mul(world.expected(x, rows, 0, GATE_UP), "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
