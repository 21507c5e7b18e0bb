"""Shrink of A in fp12 against the reference, and unpacking.

On a GPU benchmarks compare them: the interpreter multiplies float32 where tensor cores multiply
bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loramux.adapters.packed.fp12 import pack_fp12
from tests.lora_factory import FP12_SITES, LIMITS, LoraWorld, Selection, make_world, random_rows

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton
import triton.language as tl

from loramux.kernels.gpu.lora import segmented as lora_gpu
from loramux.kernels.gpu.lora.fp12 import FP12_SCALE, load_planes
from loramux.kernels.gpu.lora.fp12 import unpack_fp12 as unpack_on_gpu
from loramux.kernels.gpu.pdl import axis
from loramux.kernels.reference import lora_segmented
from loramux.kernels.reference.fp12 import read_fp12, unpack_fp12

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
QKV, O_PROJ, GATE_UP = range(3)


def rows_of(counts: list[int]) -> list[Selection]:
    """counts[slot] rows of each adapter."""
    return [((slot, 1.0),) for slot, count in enumerate(counts) for _ in range(count)]


def written(world: LoraWorld) -> torch.Tensor:
    """Partial sums; NaN marks those that were not written and are not read."""
    return world.tables.partials.nan_to_num(0.0)


def check_sums(world: LoraWorld, rows: list[Selection], site: int) -> None:
    world.plan(rows)
    x, _ = random_rows(len(rows), site, dtype=torch.bfloat16, sites=FP12_SITES)
    found = {}
    for kernels in (lora_segmented, lora_gpu):
        world.tables.partials.fill_(float("nan"))
        kernels.shrink(world.tables, world.pool, x, 1, site)
        found[kernels] = written(world)
    torch.testing.assert_close(found[lora_gpu], found[lora_segmented], atol=1e-4, rtol=1e-4)
    assert found[lora_gpu].any()


@pytest.mark.parametrize(
    ("counts", "rank", "site"),
    [
        ([1, 1, 1], 16, QKV),
        ([2, 1], 3, O_PROJ),
        ([2, 2], 8, GATE_UP),
        ([1, 2], 20, QKV),
        ([1], 64, O_PROJ),
        ([1], 200, O_PROJ),
        ([1, 1], 20, GATE_UP),
    ],
)
def test_sums_of_few_rows_equal_the_reference(counts: list[int], rank: int, site: int) -> None:
    world = make_world([dict.fromkeys(ALL, rank)] * len(counts), is_fp12=True)
    check_sums(world, rows_of(counts), site)


@pytest.mark.parametrize(
    ("rank", "few_rows", "site"),
    [
        (3, 2, QKV),
        (20, 0, QKV),
        (16, 2, O_PROJ),
        (3, 0, O_PROJ),
        (20, 2, GATE_UP),
        (16, 0, GATE_UP),
    ],
)
def test_sums_of_tiles_equal_the_reference(rank: int, few_rows: int, site: int) -> None:
    limits = replace(LIMITS, few_rows=few_rows)
    world = make_world([dict.fromkeys(ALL, rank), {"v_proj": 18}], is_fp12=True, limits=limits)
    check_sums(world, rows_of([19, 5]), site)


def test_rows_get_what_their_adapters_add() -> None:
    """Beside base rows, with several adapters, and where an adapter skips a projection or layer."""
    world = make_world(
        [dict.fromkeys(ALL, 3), {"v_proj": 20}, dict.fromkeys(ALL, 4)], skip=[(2, 1)], is_fp12=True
    )
    rows: list[Selection] = [((0, 1.0),), (), ((1, 0.5), (0, -2.0)), ((2, 1.0),), ((1, 1.0),)]
    world.plan(rows)
    world.tables.partials.fill_(float("nan"))
    x, y = random_rows(len(rows), QKV, dtype=torch.bfloat16, sites=FP12_SITES)
    expected = world.expected(y, x, rows, 1, QKV)
    lora_gpu.shrink(world.tables, world.pool, x, 1, QKV)
    lora_gpu.expand(world.tables, world.pool, y, 1, QKV)
    torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_rows", [1, 19], ids=["row", "tiles"])
def test_subnormal_weights_count(num_rows: int) -> None:
    """Below the smallest normal bfloat16 after unpacking, which must not be flushed to zero."""
    world = make_world([{"o_proj": 8}], is_fp12=True)
    rows = torch.randint(-127, 128, (8, 128)) * 2.0**-21
    words = pack_fp12(rows.to(torch.bfloat16)).view(torch.bfloat16).flatten()
    start = int(world.directory[0, 0, 0]) * 64
    world.pool.view(-1)[start : start + words.numel()] = words
    world.plan([((0, 1.0),)] * num_rows)
    world.tables.partials.fill_(float("nan"))
    x = torch.randn(num_rows, 128).to(torch.bfloat16)
    lora_gpu.shrink(world.tables, world.pool, x, 0, O_PROJ)
    expected = x.float() @ rows.t()
    found = world.tables.partials[:num_rows, 0, 0, :8]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)
    assert expected.abs().max() > 1e-5


def random_words(num_rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(num_rows, width, generator=generator) / 4
    rows[rows.abs() < 0.05] /= 2**14
    return pack_fp12(rows.clamp(-1.9, 1.9).to(torch.bfloat16))


@triton.jit
def _unpack(words, out, IN: tl.constexpr, BLOCKS: tl.constexpr):
    column = axis(4, 0, 4) * (BLOCKS * 128) + axis(128, 3, 4) + axis(BLOCKS, 2, 4) * 128
    at = words + axis(2, 1, 4) * (3 * IN) + column
    planes = load_planes(at, IN, column < IN, "")
    weights = unpack_on_gpu(planes, 4, 2, BLOCKS, False)
    row = tl.arange(0, 16)[None, :, None]
    width: tl.constexpr = BLOCKS * 128
    column = tl.arange(0, 4)[:, None, None] * width + tl.arange(0, width)[None, None, :]
    tl.store(out + row * IN + column, weights * FP12_SCALE, mask=column < IN)


@pytest.mark.parametrize(("blocks", "missing"), [(1, 0), (1, 128), (2, 128)])
def test_unpacking_for_tensor_cores_equals_the_reference(blocks: int, missing: int) -> None:
    width = 512 * blocks - missing
    words = random_words(16, width)
    out = torch.full((16, width), float("nan"))
    _unpack[(1,)](words, out, width, blocks)
    assert torch.equal(out, unpack_fp12(words))
    assert out.abs().max() > 0.5


def test_rows_are_unpacked_from_their_offset_in_a_pool() -> None:
    words = random_words(11, 256)
    pool = torch.full((3, 4096 + 64), float("nan"), dtype=torch.bfloat16)
    form = words.view(torch.bfloat16).flatten()
    pool.view(-1)[192 : 192 + form.numel()] = form
    assert torch.equal(read_fp12(pool, 192, 11, 256), unpack_fp12(words)[:11])
