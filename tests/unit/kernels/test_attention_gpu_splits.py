"""The attention kernel's own choices: how tiles and partial results are shaped changes nothing."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.attention import ops as attention_triton
from loramux.kernels.gpu.attention.ops import Tiles  # noqa: E402
from loramux.kernels.ops import AttendArgs, SequenceRows  # noqa: E402
from loramux.kernels.reference import attention as attention_torch
from loramux.types.kv import KVLayout  # noqa: E402

DEVICE = torch.device(os.environ.get("LORAMUX_TEST_DEVICE", "cpu"))
# The interpreter multiplies bfloat16 wrongly.
SIXTEEN_BITS = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16)
TILES = {
    "one tile a step": Tiles(16, 16, 16, 1, 5, 2),
    "two tiles a step": Tiles(16, 16, 64, 1, 5, 2, num_tiles=2),
    "tiles over several pages": Tiles(16, 64, 64, 4, 3, 2),
    "many items, merged two at a time": Tiles(16, 16, 16, 1, 5, 16, reduced_per_warp=64),
    "large query blocks": Tiles(64, 32, 32, 4, 3, 8, two_phases=True),
}


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("window", [None, 9])
def test_any_shape_of_tiles_equals_the_reference(
    tiles: Tiles, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_triton, "decode_tiles", lambda *_, **__: tiles)
    monkeypatch.setattr(attention_triton, "prefill_tiles", lambda *_: tiles)
    torch.manual_seed(1)
    order = torch.randperm(9).tolist()
    sequences = [
        SequenceRows(0, 1, 69, order[:5]),
        SequenceRows(1, 6, 26, order[5:7]),
        SequenceRows(7, 2, 0, order[7:8]),
    ]
    storage = torch.randn(9, 2 * 2 * 16 * 2 * 16)
    q = torch.randn(9, 6, 16)
    args = AttendArgs(layer=1, scale=0.3, sliding_window=window)
    plan = attention_triton.plan(sequences, LAYOUT, DEVICE)
    actual = plan.attend(storage, q, args)
    expected = attention_torch.plan(sequences, LAYOUT, DEVICE).attend(storage, q, args)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


# Each group of heads with one dimension, and each dimension with two groups.
PARTS = [(1, 64, 24), (3, 1024, 16), (4, 2048, 128), (6, 512, 24), (8, 4096, 16), (16, 64, 128)]


@pytest.mark.parametrize(
    ("group", "merged", "head_dim"),
    [
        pytest.param(group, merged, dim, marks=() if dim == quick else pytest.mark.slow)
        for group, merged, quick in PARTS
        for dim in (16, 24, 128)
    ],
)
def test_parts_of_decodes_add_up(
    group: int, merged: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve of them, one, and those of a sequence without tokens; a few at once, or all."""
    tiles = Tiles(16, 16, 16, 1, 5, 16, reduced_per_warp=merged)
    monkeypatch.setattr(attention_triton, "decode_tiles", lambda *_, **__: tiles)
    torch.manual_seed(2)
    layout = KVLayout(1, 2, head_dim, 16)
    lengths = [40, 180, 0, 1]
    pages = torch.randperm(4 * 12).int().view(4, 12)
    storage = torch.randn(4 * 12, 2 * 16 * 2 * head_dim)
    q = torch.randn(4, 2 * group, head_dim)
    args = AttendArgs(layer=0, scale=0.3)
    plan = attention_triton.plan_decodes(pages, layout, q)
    plan.partition(torch.tensor(lengths, dtype=torch.int32))
    assert plan.work[None][0].items[:, 6].max() == 12
    live = [row for row, length in enumerate(lengths) if length]
    sequences = [
        SequenceRows(place, 1, lengths[row] - 1, pages[row].tolist())
        for place, row in enumerate(live)
    ]
    reference = attention_torch.plan(sequences, layout, DEVICE)
    expected = reference.attend(storage, q[live], args)
    # A second time, as what arrives is counted from zero again.
    for _ in range(2):
        actual = plan.attend(storage, q, args)[live]
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_parts_of_sixteen_bits(dtype: torch.dtype) -> None:
    """By the tiles that a server has, whatever the number of rows."""
    layout = KVLayout(1, 2, 128, 16)
    for num_rows in (1, 13, 18, 28, 36, 50):
        torch.manual_seed(num_rows)
        lengths = torch.randint(1, 130, (num_rows,), dtype=torch.int32)
        pages = torch.randperm(num_rows * 9).int().view(num_rows, 9)
        storage = torch.randn(num_rows * 9, 2 * 16 * 2 * 128).to(dtype)
        q = torch.randn(num_rows, 8, 128).to(dtype)
        args = AttendArgs(layer=0, scale=0.1)
        plan = attention_triton.plan_decodes(pages, layout, q)
        plan.partition(lengths)
        sequences = [
            SequenceRows(row, 1, length - 1, pages[row].tolist())
            for row, length in enumerate(lengths.tolist())
        ]
        reference = attention_torch.plan(sequences, layout, DEVICE)
        actual = plan.attend(storage, q, args).float()
        expected = reference.attend(storage.float(), q.float(), args)
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_decodes_that_may_be_copied_are_cut_as_before() -> None:
    """Kernels of copied tiles have no registers for two tiles' parts."""
    layout = KVLayout(1, 8, 128, 16)
    found = [
        attention_triton.decode_tiles(4, layout, torch.bfloat16, ctas_per_sm=each)
        for each in (0.1, 3, 3.1, 4.1, 6.1, 8.1, 11, 11.1, 500)
    ]
    assert [tiles.num_tiles for tiles in found] == [2, 2, 2, 2, 1, 2, 2, 1, 1]
    assert found[-1] == attention_triton.decode_tiles(4, layout, torch.bfloat16)


def test_rows_without_a_slot_are_not_stored() -> None:
    storage = torch.zeros(3, 2 * 2 * 16 * 2 * 16)
    plan = attention_triton.Plan(
        layout=LAYOUT,
        page_table=torch.zeros(2, 1, dtype=torch.int32),
        slots=torch.tensor([-1, 17], dtype=torch.int32),
    )
    plan.write_kv(storage, 0, torch.ones(2, 2, 16), torch.ones(2, 2, 16))
    assert storage.count_nonzero() == 2 * 2 * 16
    assert storage[1].count_nonzero() == 2 * 2 * 16
