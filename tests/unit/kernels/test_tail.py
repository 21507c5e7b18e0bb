"""Kernels that read h from the base's product: Triton in the interpreter, and the torch twin.

The interpreter's matrix product is wrong for bfloat16, so tiles are checked in it on a GPU alone
(benchmarks/gpu_tail.py).
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.gpu.lora_augmented.tables import AugmentedLaunch  # noqa: E402
from loramux.kernels.ops import (  # noqa: E402
    KVTarget,
    Norm,
    PagedLayout,  # noqa: E402
    Rotation,
)
from loramux.kernels.reference import elementwise as fused_torch
from loramux.kernels.reference import lora_augmented as augmented_reference
from tests.attention_factory import random_angles  # noqa: E402
from tests.augmented_factory import LONG_TILE, ROW, TILE, AugmentedWorld, make_augmented_world  # noqa: E402
from tests.lora_factory import NUM_LAYERS, SITES, Selection, random_rows  # noqa: E402

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
QKV, O_PROJ, GATE_UP = range(3)
LAUNCHES = {"rows": ROW, "tiles": TILE, "long tiles": LONG_TILE}
LIMITS = {
    torch.float32: {"atol": 1e-4, "rtol": 1e-4},
    torch.float16: {"atol": 2e-2, "rtol": 2e-2},
}
PAIR = ((0, 0.5), (1, -2.0))
MIXES: dict[str, tuple[list[dict[str, int]], list[Selection]]] = {
    "rank 1 beside base rows": ([dict.fromkeys(ALL, 1)], [(), ((0, 1.0),), ()]),
    "one adapter": ([dict.fromkeys(ALL, 16)], [((0, 1.0),)] * 17),
    "weighted": (
        [dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 20)],
        [((0, 1.0),), PAIR, PAIR, ((1, 1.0),), ((1, 1.0),), ((1, 0.5), (0, 3.0)), ()],
    ),
    "some places": (
        [{"q_proj": 3}, {"v_proj": 20, "up_proj": 2, "o_proj": 1}, {"gate_proj": 16}],
        [((0, 1.0),), ((0, 1.0),), ((1, 1.0),), ((2, 1.0),), ((2, 2.0), (0, 1.0))],
    ),
    "one is popular": (
        [dict.fromkeys(ALL, 40), dict.fromkeys(ALL, 3)],
        [((0, 1.0),)] * 18 + [((1, 1.0),)] + [()] * 2,
    ),
    "rank 200": ([dict.fromkeys(ALL, 200)], [((0, 1.0),), ()]),
    "no adapters": ([dict.fromkeys(ALL, 4)], [(), ()]),
}
each_kernel = pytest.mark.parametrize(
    "kernels", [augmented_reference, augmented_gpu], ids=["torch", "triton"]
)
each_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
# A norm takes a row at a time, however long tiles are.
each_norm = pytest.mark.parametrize("launch", [ROW, TILE], ids=["rows", "tiles"])
each_tile = pytest.mark.parametrize("launch", [TILE, LONG_TILE], ids=["tiles", "long tiles"])
each_mix = pytest.mark.parametrize("mix", MIXES)


def world_of(
    mix: str, launch: AugmentedLaunch, dtype: torch.dtype = torch.float32
) -> tuple[AugmentedWorld, list[Selection]]:
    ranks, rows = MIXES[mix]
    world = make_augmented_world(ranks, augmented_reference, dtype=dtype, skip=[(2, 1)])
    world.step(rows, launch)
    return world, rows


@each_kernel
@pytest.mark.parametrize("is_fp12", [False, True], ids=["as it is", "twelve bits"])
def test_a_block_is_an_adapters_group_and_zero_where_it_has_none(
    kernels: ModuleType, is_fp12: bool
) -> None:
    """Catches what the last owner of a block left there, and rows beyond a rank."""
    ranks = [{"q_proj": 3, "v_proj": 20}]
    world = make_augmented_world(ranks, kernels, skip=[(0, 1)], is_fp12=is_fp12)
    assert world.blocks[0, :2].tolist() == [2, 1]
    a = world.lora.weights[0][0, "v_proj"][0]
    tail = world.store.weights[0][QKV]
    assert torch.equal(tail[2, 2], a[:16])
    assert torch.equal(tail[1, 2, :4], a[16:])
    assert not tail[1, 2, 4:].any()
    assert not tail[2, 1].any() and not tail[1, 0].any(), "no k_proj, no second group of q_proj"
    assert torch.equal(tail[2, 0, :3], world.lora.weights[0][0, "q_proj"][0])
    for site in range(len(SITES)):
        assert not world.store.weights[1][site][1:3].any(), "nothing in the second layer"
        assert world.store.weights[0][site][[0, 3]].isnan().all(), "blocks of others"


@each_kernel
@each_norm
@each_mix
def test_add_norm(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    world, rows = world_of(mix, launch)
    layer = NUM_LAYERS - 1
    x, _ = random_rows(len(rows), O_PROJ)
    size = sum(SITES[O_PROJ].out_features)
    norm = Norm(torch.randn(size), 1e-5)
    after = Norm(torch.randn(size), 1e-4) if mix == "weighted" else None
    residual, twin_residual = torch.ones(2, len(rows), size).unbind()
    y = world.product(x, layer, O_PROJ)
    actual = kernels.add_norm(y, residual, norm, after, world.at(layer, O_PROJ, launch))
    expected = fused_torch.add_norm(
        world.expected(x, rows, layer, O_PROJ), twin_residual, norm, after
    )
    torch.testing.assert_close(residual, twin_residual, **LIMITS[torch.float32])
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])


@each_kernel
@each_norm
@each_mix
def test_add_norm_of_parts(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), O_PROJ)
    size = sum(SITES[O_PROJ].out_features)
    norm = Norm(torch.randn(size), 1e-5)
    after = Norm(torch.randn(size), 1e-4) if mix == "weighted" else None
    residual, twin_residual = torch.ones(2, len(rows), size).unbind()
    y = world.parts(x, 0, O_PROJ, 4)
    actual = kernels.add_norm(y, residual, norm, after, world.at(0, O_PROJ, launch))
    expected = fused_torch.add_norm(world.expected(x, rows, 0, O_PROJ), twin_residual, norm, after)
    torch.testing.assert_close(residual, twin_residual, **LIMITS[torch.float32])
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])


@each_kernel
@each_tile
@each_mix
def test_expand_of_parts(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    """Every row is written, with an adapter or without, and none of the parts."""
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), O_PROJ)
    y = world.parts(x, 0, O_PROJ, 2)
    before = y.clone()
    actual = kernels.expand(y, world.at(0, O_PROJ, launch))
    expected = world.expected(x, rows, 0, O_PROJ)
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])
    torch.testing.assert_close(y, before, rtol=0, atol=0, equal_nan=True)


@each_launch
def test_parts_in_float16_are_rounded_as_a_whole_product_is(launch: AugmentedLaunch) -> None:
    world, rows = world_of("weighted", launch, torch.float16)
    x, _ = random_rows(len(rows), O_PROJ, dtype=torch.float16)
    site = world.at(0, O_PROJ, launch)
    parts = world.parts(x, 0, O_PROJ, 2)
    size = sum(SITES[O_PROJ].out_features)
    norm = Norm(torch.ones(size), 1e-5)
    sums = torch.zeros(2, len(rows), size, dtype=torch.float16)
    augmented_gpu.add_norm(parts, sums[0], norm, None, site)
    augmented_gpu.add_norm(parts.sum(0).half(), sums[1], norm, None, site)
    torch.testing.assert_close(sums[0], sums[1], **LIMITS[torch.float16])
    assert rows[-1] == () and torch.equal(sums[0, -1], sums[1, -1])
    if launch.tile_rows > 1:
        for kernels in (augmented_gpu, augmented_reference):
            y = kernels.expand(parts, site)
            torch.testing.assert_close(y, sums[1], **LIMITS[torch.float16])
            assert torch.equal(y[-1], sums[1, -1])


@each_kernel
@each_tile
@each_mix
def test_expand(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    """Catches programs of a tile's last rows that go on into the next tile, or beyond the step."""
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), O_PROJ)
    size = sum(SITES[O_PROJ].out_features)
    y = world.product(x, 0, O_PROJ)
    room = torch.full((len(rows) + 16, y.shape[1]), 7.0)
    room[: len(rows)] = y
    actual = kernels.expand(room[: len(rows)], world.at(0, O_PROJ, launch))
    expected = world.expected(x, rows, 0, O_PROJ)
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])
    assert actual.data_ptr() == room.data_ptr(), "in place"
    assert (room[len(rows) :] == 7.0).all()
    is_base = torch.tensor([row == () for row in rows])
    assert torch.equal(room[: len(rows), :size][is_base], y[is_base, :size])


@each_kernel
@each_launch
@each_mix
def test_activate_mul(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    activation = "gelu" if mix == "weighted" else "silu"
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.product(x, 0, GATE_UP)
    actual = kernels.activate_mul(y, activation, world.at(0, GATE_UP, launch))
    expected = fused_torch.activate_mul(world.expected(x, rows, 0, GATE_UP), activation)
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])


def rotated(
    world: AugmentedWorld,
    rows: list[Selection],
    launch: AugmentedLaunch,
    kernels: ModuleType,
    norm: bool,
) -> None:
    dtype, num_rows = world.lora.pool.dtype, len(rows)
    head_dim, kv_heads = 16, 1
    layout = PagedLayout(NUM_LAYERS, kv_heads, head_dim, block_tokens=4)
    cos, sin = random_angles(num_rows, head_dim)
    # Padding is not stored.
    slots = torch.arange(num_rows, dtype=torch.int32) * 3 + 1
    slots[0] = -1
    storage = torch.randn(24, NUM_LAYERS * 2 * 4 * kv_heads * head_dim).to(dtype)
    head_norm = Norm(torch.randn(6, head_dim), 1e-6) if norm else None
    x, _ = random_rows(num_rows, QKV, dtype=dtype)
    y = world.product(x, 1, QKV)
    found = KVTarget(storage.clone(), slots, layout, 1)
    actual = kernels.rotate_write(y, Rotation(cos, sin, head_norm), found, world.at(1, QKV, launch))
    known = KVTarget(storage.clone(), slots, layout, 1)
    expected = fused_torch.rotate_write(
        world.expected(x, rows, 1, QKV), Rotation(cos, sin, head_norm), known
    )
    torch.testing.assert_close(actual, expected, **LIMITS[dtype])
    torch.testing.assert_close(found.storage, known.storage, **LIMITS[dtype])


@each_kernel
@each_launch
@each_mix
def test_rotate_write(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    world, rows = world_of(mix, launch)
    rotated(world, rows, launch, kernels, norm=mix == "weighted")


@each_launch
def test_float16(launch: AugmentedLaunch) -> None:
    world, rows = world_of("weighted", launch, torch.float16)
    rotated(world, rows, launch, augmented_gpu, norm=True)


@each_launch
def test_base_rows_keep_their_bits(launch: AugmentedLaunch) -> None:
    world, rows = world_of("rank 1 beside base rows", launch)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.product(x, 0, GATE_UP)
    plain = fused_torch.activate_mul(y[:, : sum(SITES[GATE_UP].out_features)].clone(), "silu")
    actual = augmented_gpu.activate_mul(y, "silu", world.at(0, GATE_UP, launch))
    twin = augmented_reference.activate_mul(y, "silu", world.at(0, GATE_UP, launch))
    torch.testing.assert_close(actual[[0, 2]], plain[[0, 2]])
    assert torch.equal(twin[[0, 2]], plain[[0, 2]])
