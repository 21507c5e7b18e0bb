"""Units whose A is in twelve bits against the reference; on a GPU benchmarks/lib/gpu_lora.py
does it, since matrix units multiply other numbers there than the interpreter does here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loramux.adapters.packed.fp12 import pack_fp12
from tests.lora_factory import LIMITS, SHORT_SITES, LoraWorld, Selection, make_world, random_rows

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora import segmented as lora_triton
from loramux.kernels.reference import lora_segmented

pytestmark = pytest.mark.usefixtures("both_orders")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
QKV, O_PROJ, GATE_UP = range(3)
SITES = pytest.mark.parametrize("site", [QKV, O_PROJ, GATE_UP], ids=["qkv", "o", "gate_up"])


def rows_of(counts: list[int]) -> list[Selection]:
    """counts[slot] rows of each adapter."""
    return [((slot, 1.0),) for slot, count in enumerate(counts) for _ in range(count)]


def written(world: LoraWorld) -> torch.Tensor:
    """Sums that are no numbers were not written, and are not read."""
    return world.tables.partials.nan_to_num(0.0)


def check_sums(world: LoraWorld, rows: list[Selection], site: int) -> None:
    world.plan(rows)
    x, _ = random_rows(len(rows), site, dtype=torch.bfloat16, sites=SHORT_SITES)
    found = {}
    for kernels in (lora_segmented, lora_triton):
        world.tables.partials.fill_(float("nan"))
        kernels.shrink(world.tables, world.pool, x, 1, site)
        found[kernels] = written(world)
    torch.testing.assert_close(found[lora_triton], found[lora_segmented], atol=1e-4, rtol=1e-4)
    assert found[lora_triton].any()


@SITES
@pytest.mark.parametrize(
    ("counts", "rank"),
    [([1, 1, 1], 16), ([2, 1], 3), ([2, 2], 8), ([1, 2], 20), ([1], 64), ([1], 200)],
    ids=["distinct", "rank 3", "rank 8", "rank 20", "rank 64", "rank 200"],
)
def test_sums_of_few_rows_equal_the_reference(counts: list[int], rank: int, site: int) -> None:
    world = make_world([dict.fromkeys(ALL, rank)] * len(counts), is_fp12=True)
    check_sums(world, rows_of(counts), site)


@SITES
@pytest.mark.parametrize("rank", [3, 16, 20])
@pytest.mark.parametrize("alone_rows", [2, 0], ids=["beside rows", "prompts"])
def test_sums_of_tiles_equal_the_reference(rank: int, alone_rows: int, site: int) -> None:
    limits = replace(LIMITS, alone_rows=alone_rows)
    world = make_world([dict.fromkeys(ALL, rank), {"v_proj": 18}], is_fp12=True, limits=limits)
    check_sums(world, rows_of([19, 5]), site)


def test_rows_get_what_their_adapters_add() -> None:
    """Beside base rows, composed, and where an adapter leaves a projection or layer alone."""
    world = make_world(
        [dict.fromkeys(ALL, 3), {"v_proj": 20}, dict.fromkeys(ALL, 4)], skip=[(2, 1)], is_fp12=True
    )
    rows: list[Selection] = [((0, 1.0),), (), ((1, 0.5), (0, -2.0)), ((2, 1.0),), ((1, 1.0),)]
    world.plan(rows)
    world.tables.partials.fill_(float("nan"))
    x, y = random_rows(len(rows), QKV, dtype=torch.bfloat16, sites=SHORT_SITES)
    expected = world.expected(y, x, rows, 1, QKV)
    lora_triton.shrink(world.tables, world.pool, x, 1, QKV)
    lora_triton.expand(world.tables, world.pool, y, 1, QKV)
    torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_rows", [1, 19], ids=["row", "tiles"])
def test_small_weights_count(num_rows: int) -> None:
    """Below the smallest normal number, where a matrix unit might see zeros."""
    world = make_world([{"o_proj": 8}], is_fp12=True)
    rows = torch.randint(-127, 128, (8, 128)) * 2.0**-21
    group = world.directory[0, 0]
    words = pack_fp12(rows.to(torch.bfloat16)).view(torch.bfloat16).flatten()
    start = int(group[0]) * 64
    world.pool.view(-1)[start : start + words.numel()] = words
    world.plan([((0, 1.0),)] * num_rows)
    world.tables.partials.fill_(float("nan"))
    x = torch.randn(num_rows, 128).to(torch.bfloat16)
    lora_triton.shrink(world.tables, world.pool, x, 0, O_PROJ)
    expected = x.float() @ rows.t()
    found = world.tables.partials[:num_rows, 0, 0, :8]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)
    assert expected.abs().max() > 1e-5
