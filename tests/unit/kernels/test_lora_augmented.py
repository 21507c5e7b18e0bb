"""LoRA on augmented weights: kernels in the interpreter, and their reference.

The interpreter's dot rounds bfloat16 differently, so bfloat16 tiles are checked on a GPU only.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora.work_list import TILE_FIRST
from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.gpu.lora_augmented.tables import AugmentedLaunch  # noqa: E402
from loramux.kernels.ops import (  # noqa: E402
    KVLayout,  # noqa: E402
    KVTarget,
    Norm,
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
        [dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 20), {"q_proj": 2, "o_proj": 17, "up_proj": 1}],
        [((0, 1.0),), PAIR, PAIR, ((1, 1.0),), ((1, 1.0),), ((2, -1.0), (0, 3.0), (1, 0.5)), ()],
    ),
    "some projections": (
        [{"q_proj": 3}, {"v_proj": 20, "up_proj": 2, "o_proj": 1}, {"gate_proj": 16}],
        [((0, 1.0),), ((0, 1.0),), ((1, 1.0),), ((2, 1.0),), ((2, 2.0), (0, 1.0))],
    ),
    "one popular adapter": (
        [dict.fromkeys(ALL, 40), dict.fromkeys(ALL, 3)],
        [((0, 1.0),)] * 18 + [((1, 1.0),)] + [()] * 2,
    ),
    "rank 200": ([dict.fromkeys(ALL, 200)], [((0, 1.0),), ()]),
    "no adapters": ([dict.fromkeys(ALL, 4)], [(), ()]),
}
each_kernel = pytest.mark.parametrize(
    "kernels", [augmented_reference, augmented_gpu], ids=["reference", "gpu"]
)
each_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)


def pairs(*launches: str) -> pytest.MarkDecorator:
    """Every mix with the first launch, and the mix with most cases with the others."""
    found = [(mix, launches[0]) for mix in MIXES]
    found += [(m, n) for n in launches[1:] for m in ("weighted", "one popular adapter")]
    slow = {("one popular adapter", name) for name in launches[1:]}
    return pytest.mark.parametrize(
        ("mix", "launch"),
        [
            pytest.param(
                mix,
                LAUNCHES[name],
                id=f"{mix}, {name}",
                marks=pytest.mark.slow if (mix, name) in slow else (),
            )
            for mix, name in found
        ],
    )


def world_of(
    mix: str, launch: AugmentedLaunch, dtype: torch.dtype = torch.float32
) -> tuple[AugmentedWorld, list[Selection]]:
    ranks, rows = MIXES[mix]
    world = make_augmented_world(ranks, augmented_reference, dtype=dtype, skip=[(2, 1)])
    world.step(rows, launch)
    return world, rows


@each_kernel
@pytest.mark.parametrize("is_fp12", [False, True], ids=["bfloat16", "fp12"])
def test_a_block_is_an_adapters_rank_block_and_zero_where_it_has_none(
    kernels: ModuleType, is_fp12: bool
) -> None:
    """Catches rows of the block's previous adapter, and rows beyond a rank."""
    ranks = [{"q_proj": 3, "v_proj": 20}]
    world = make_augmented_world(ranks, kernels, skip=[(0, 1)], is_fp12=is_fp12)
    assert world.blocks[0, :2].tolist() == [2, 1]
    a = world.lora.weights[0][0, "v_proj"][0]
    appended = world.weights.weights[0][QKV]
    assert torch.equal(appended[2, 2], a[:16])
    assert torch.equal(appended[1, 2, :4], a[16:])
    assert not appended[1, 2, 4:].any()
    assert not appended[2, 1].any() and not appended[1, 0].any(), (
        "no k_proj, no second rank block of q_proj"
    )
    assert torch.equal(appended[2, 0, :3], world.lora.weights[0][0, "q_proj"][0])
    for site in range(len(SITES)):
        assert not world.weights.weights[1][site][1:3].any(), "nothing in the second layer"
        assert world.weights.weights[0][site][[0, 3]].isnan().all(), "other blocks"


@each_kernel
@pairs("rows", "tiles")
def test_add_norm(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    world, rows = world_of(mix, launch)
    layer = NUM_LAYERS - 1
    x, _ = random_rows(len(rows), O_PROJ)
    size = sum(SITES[O_PROJ].out_features)
    norm = Norm(torch.randn(size), 1e-5)
    after = Norm(torch.randn(size), 1e-4) if mix == "weighted" else None
    residual, expected_residual = torch.ones(2, len(rows), size).unbind()
    y = world.gemm(x, layer, O_PROJ)
    actual = kernels.add_norm(y, residual, norm, after, world.at(layer, O_PROJ, launch))
    expected = fused_torch.add_norm(
        world.expected(x, rows, layer, O_PROJ), expected_residual, norm, after
    )
    torch.testing.assert_close(residual, expected_residual, **LIMITS[torch.float32])
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])


@each_kernel
@pairs("rows", "tiles")
def test_add_norm_of_split_k(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), O_PROJ)
    size = sum(SITES[O_PROJ].out_features)
    norm = Norm(torch.randn(size), 1e-5)
    after = Norm(torch.randn(size), 1e-4) if mix == "weighted" else None
    residual, expected_residual = torch.ones(2, len(rows), size).unbind()
    y = world.split_k(x, 0, O_PROJ, 4)
    actual = kernels.add_norm(y, residual, norm, after, world.at(0, O_PROJ, launch))
    expected = fused_torch.add_norm(
        world.expected(x, rows, 0, O_PROJ), expected_residual, norm, after
    )
    torch.testing.assert_close(residual, expected_residual, **LIMITS[torch.float32])
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])


@each_kernel
@pairs("tiles", "long tiles")
def test_expand_of_split_k(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    """Writes every row, with an adapter or without, and does not change the partial sums."""
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), O_PROJ)
    y = world.split_k(x, 0, O_PROJ, 2)
    before = y.clone()
    actual = kernels.expand(y, world.at(0, O_PROJ, launch))
    expected = world.expected(x, rows, 0, O_PROJ)
    torch.testing.assert_close(actual, expected, **LIMITS[torch.float32])
    torch.testing.assert_close(y, before, rtol=0, atol=0, equal_nan=True)


@each_launch
def test_split_k_in_float16_is_rounded_like_a_whole_gemm(launch: AugmentedLaunch) -> None:
    world, rows = world_of("weighted", launch, torch.float16)
    x, _ = random_rows(len(rows), O_PROJ, dtype=torch.float16)
    site = world.at(0, O_PROJ, launch)
    partials = world.split_k(x, 0, O_PROJ, 2)
    size = sum(SITES[O_PROJ].out_features)
    norm = Norm(torch.ones(size), 1e-5)
    sums = torch.zeros(2, len(rows), size, dtype=torch.float16)
    augmented_gpu.add_norm(partials, sums[0], norm, None, site)
    augmented_gpu.add_norm(partials.sum(0).half(), sums[1], norm, None, site)
    torch.testing.assert_close(sums[0], sums[1], **LIMITS[torch.float16])
    assert rows[-1] == () and torch.equal(sums[0, -1], sums[1, -1])
    if launch.tile_rows > 1:
        for kernels in (augmented_gpu, augmented_reference):
            y = kernels.expand(partials, site)
            torch.testing.assert_close(y, sums[1], **LIMITS[torch.float16])
            assert torch.equal(y[-1], sums[1, -1])


@each_kernel
@pairs("tiles", "long tiles")
def test_expand(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    """Catches a tile that writes rows of the next tile, or beyond the step."""
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), O_PROJ)
    size = sum(SITES[O_PROJ].out_features)
    y = world.gemm(x, 0, O_PROJ)
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
@pairs("tiles", "rows", "long tiles")
def test_activate_mul(mix: str, launch: AugmentedLaunch, kernels: ModuleType) -> None:
    activation = "gelu" if mix == "weighted" else "silu"
    world, rows = world_of(mix, launch)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.gemm(x, 0, GATE_UP)
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
    layout = KVLayout(NUM_LAYERS, kv_heads, head_dim, block_tokens=4)
    cos, sin = random_angles(num_rows, head_dim)
    # Padding is not stored.
    slots = torch.arange(num_rows, dtype=torch.int32) * 3 + 1
    slots[0] = -1
    storage = torch.randn(24, NUM_LAYERS * 2 * 4 * kv_heads * head_dim).to(dtype)
    head_norm = Norm(torch.randn(6, head_dim), 1e-6) if norm else None
    x, _ = random_rows(num_rows, QKV, dtype=dtype)
    y = world.gemm(x, 1, QKV)
    found = KVTarget(storage.clone(), slots, layout, 1)
    actual = kernels.rotate_write(y, Rotation(cos, sin, head_norm), found, world.at(1, QKV, launch))
    known = KVTarget(storage.clone(), slots, layout, 1)
    expected = fused_torch.rotate_write(
        world.expected(x, rows, 1, QKV), Rotation(cos, sin, head_norm), known
    )
    torch.testing.assert_close(actual, expected, **LIMITS[dtype])
    torch.testing.assert_close(found.storage, known.storage, **LIMITS[dtype])


@pytest.mark.slow
@each_kernel
@pairs("tiles", "rows", "long tiles")
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
    y = world.gemm(x, 0, GATE_UP)
    plain = fused_torch.activate_mul(y[:, : sum(SITES[GATE_UP].out_features)].clone(), "silu")
    actual = augmented_gpu.activate_mul(y, "silu", world.at(0, GATE_UP, launch))
    reference = augmented_reference.activate_mul(y, "silu", world.at(0, GATE_UP, launch))
    torch.testing.assert_close(actual[[0, 2]], plain[[0, 2]])
    assert torch.equal(reference[[0, 2]], plain[[0, 2]])


ROWS: list[Selection] = [((0, 1.0),)] * 17 + [((1, 1.0),)]


def test_items_behind_the_last_one_change_nothing() -> None:
    """Items are loaded before their number is known: those of earlier steps remain."""
    world = make_augmented_world([{"o_proj": 3}, {"o_proj": 16}], augmented_reference)
    world.step(ROWS, TILE)
    tables = world.at(1, O_PROJ, TILE).tables
    tables.items[:, int(tables.work[TILE_FIRST]) :] = torch.iinfo(torch.int32).max
    x, _ = random_rows(len(ROWS), O_PROJ)
    actual = augmented_gpu.expand(world.gemm(x, 1, O_PROJ), world.at(1, O_PROJ, TILE))
    expected = world.expected(x, ROWS, 1, O_PROJ)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_partial_sums_are_reduced_before_they_are_rounded(splits: int) -> None:
    world = make_augmented_world(
        [{"o_proj": 3}, {"o_proj": 16}], augmented_reference, dtype=torch.float16
    )
    world.step(ROWS, TILE)
    x, _ = random_rows(len(ROWS), O_PROJ, dtype=torch.float16)
    y = world.split_k(x, 1, O_PROJ, splits) if splits > 1 else world.gemm(x, 1, O_PROJ)
    # Without split-K the expand is in place.
    expected = augmented_reference.expand(y.clone(), world.at(1, O_PROJ, TILE))
    actual = augmented_gpu.expand(y, world.at(1, O_PROJ, TILE))
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_ctas_share_a_row() -> None:
    """Catches columns that are counted from a CTA's first and not from the row's."""
    world = make_augmented_world(
        [{"gate_proj": 20, "up_proj": 3}, {"up_proj": 16}], augmented_reference
    )
    rows: list[Selection] = [((0, 1.0),), (), ((1, 2.0), (0, 0.5))]
    launch = replace(ROW, activate_n=16)
    assert SITES[GATE_UP].out_features[0] > launch.activate_n
    world.step(rows, launch)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.gemm(x, 0, GATE_UP)
    actual = augmented_gpu.activate_mul(y, "silu", world.at(0, GATE_UP, launch))
    expected = fused_torch.activate_mul(world.expected(x, rows, 0, GATE_UP), "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
