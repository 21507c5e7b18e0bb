"""The SwiGLU-fused expand against dense float64, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.lora_factory import LAUNCH, LIMITS, LoraWorld, Selection, make_world, random_rows

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora import segmented as lora_gpu
from loramux.kernels.ops import ACTIVATIONS  # noqa: E402
from loramux.kernels.reference import elementwise as fused_torch
from loramux.kernels.reference import lora_segmented

BOTH = ("gate_proj", "up_proj")
GATE_UP = 2
PAIR = ((0, 0.5), (1, -2.0))


def of(slot: int, count: int = 1) -> list[Selection]:
    return [((slot, 1.0),)] * count


def check(world: LoraWorld, rows: list[Selection], activation: str = "silu") -> None:
    world.plan(rows)
    world.tables.partials.fill_(float("nan"))
    x, y = random_rows(len(rows), GATE_UP, dtype=world.pool.dtype)
    expected = fused_torch.activate_mul(world.expected(y, x, rows, 1, GATE_UP), activation)
    lora_gpu.shrink(world.tables, world.pool, x, 1, GATE_UP)
    found = lora_gpu.expand_swiglu(world.tables, world.pool, y, activation, 1, GATE_UP)
    limit = 1e-4 if world.pool.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize(
    ("rows", "few_rows", "dtype"),
    [
        (of(0) + of(1), 2, torch.float32),
        (of(0) + of(1), 0, torch.float16),
        (of(0, 2) + of(1, 19), 2, torch.float16),
        (of(0, 2) + of(1, 19), 0, torch.float32),
        (of(0) + [()] * 18 + of(1, 5) + [()], 2, torch.float32),
        ([PAIR] + of(0, 2) + [PAIR] * 4 + of(1), 2, torch.float32),
        ([PAIR] + of(0, 2) + [PAIR] * 4 + of(1), 0, torch.float16),
        ([()] * 3, 2, torch.float32),
    ],
)
def test_every_row_is_activated_with_its_adapters(
    rows: list[Selection], few_rows: int, dtype: torch.dtype
) -> None:
    limits = replace(LIMITS, few_rows=few_rows)
    ranks = [dict.fromkeys(BOTH, 3), dict.fromkeys(BOTH, 20)]
    check(make_world(ranks, limits=limits, dtype=dtype), rows)


@pytest.mark.parametrize("count", [1, 3], ids=["row", "tile"])
@pytest.mark.parametrize("name", BOTH)
def test_an_adapter_of_gate_or_up_alone(name: str, count: int) -> None:
    check(make_world([{name: 4}, {"q_proj": 4}]), of(0, count) + of(1, count))


def test_a_layer_that_an_adapter_does_not_change_is_activated() -> None:
    world = make_world([dict.fromkeys(BOTH, 3)], skip=[(0, 1)])
    check(world, of(0) + of(0, 4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    check(make_world([dict.fromkeys(BOTH, 5)]), [*of(0, 3), ()], activation)


def test_ctas_loop_over_more_tiles() -> None:
    """One CTA, and many tiles of all kinds."""
    launch = replace(LAUNCH, shrinks_per_sm=1, expands_per_sm=1)
    rows = of(0) + of(1, 3) + of(2) + [()] * 20 + of(0, 4)
    check(make_world([dict.fromkeys(BOTH, 4)] * 3, launch=launch), rows)


@pytest.mark.slow
@pytest.mark.parametrize("small_rows", [0, 8])
def test_small_tiles_in_fp12_equal_the_reference(small_rows: int) -> None:
    """They have the splits of few rows, beside tiles and rows with several rank blocks."""
    limits = replace(LIMITS, small_rows=small_rows)
    ranks = [dict.fromkeys(BOTH, 3), dict.fromkeys(BOTH, 20), dict.fromkeys(BOTH, 40)]
    world = make_world(ranks, is_fp12=True, limits=limits)
    rows = of(0) + of(1, 2) + of(2, 5) + of(1, 12) + [PAIR] * 3 + [()] + of(2, 9)
    world.plan(rows)
    x, y = random_rows(len(rows), GATE_UP, dtype=torch.bfloat16, sites=world.sites)
    x /= 20
    sums = []
    for kernels in (lora_segmented, lora_gpu):
        world.tables.partials.fill_(float("nan"))
        kernels.shrink(world.tables, world.pool, x, 1, GATE_UP)
        sums.append(world.tables.partials.nan_to_num(0.0))
    torch.testing.assert_close(sums[1], sums[0], atol=1e-4, rtol=1e-4)
    # The interpreter's dot rounds bfloat16 differently: the expand is compared in float32.
    known = LoraWorld(**{**vars(world), "pool": world.pool.float()})
    y = y.float()
    expected = lora_segmented.expand_swiglu(known.tables, known.pool, y, "silu", 1, GATE_UP)
    found = lora_gpu.expand_swiglu(known.tables, known.pool, y, "silu", 1, GATE_UP)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
