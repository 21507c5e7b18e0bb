"""The attention kernel's own choices: how tiles and partial results are shaped changes nothing."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels import attention_torch, attention_triton  # noqa: E402
from loramux.kernels.attention_triton import Tiles  # noqa: E402
from loramux.kernels.interface import AttendArgs, PagedLayout, SequenceRows  # noqa: E402

DEVICE = torch.device(os.environ.get("LORAMUX_TEST_DEVICE", "cpu"))
LAYOUT = PagedLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16)
TILES = {
    "one tile a step": Tiles(16, 16, 16, 1, 5, 2),
    "two tiles a step": Tiles(16, 16, 64, 1, 5, 2, num_tiles=2),
    "tiles over several pages": Tiles(16, 64, 64, 4, 3, 2),
    "many items, merged two at a time": Tiles(16, 16, 16, 1, 5, 16, merged_per_warp=64),
    "large query blocks": Tiles(64, 32, 32, 4, 3, 8, two_phases=True),
}


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("window", [None, 9])
def test_any_shape_of_tiles_equals_the_reference(
    tiles: Tiles, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_triton, "decode_tiles", lambda *_, **__: tiles)
    monkeypatch.setattr(attention_triton, "prompt_tiles", lambda *_: tiles)
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
    actual = attention_triton.attend(storage, plan, q, args)
    expected = attention_torch.attend(
        storage, attention_torch.plan(sequences, LAYOUT, DEVICE), q, args
    )
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_rows_without_a_slot_are_not_stored() -> None:
    storage = torch.zeros(3, 2 * 2 * 16 * 2 * 16)
    plan = attention_triton.Plan(
        layout=LAYOUT,
        page_table=torch.zeros(2, 1, dtype=torch.int32),
        slots=torch.tensor([-1, 17], dtype=torch.int32),
    )
    attention_triton.write_kv(storage, plan, 0, torch.ones(2, 2, 16), torch.ones(2, 2, 16))
    assert storage.count_nonzero() == 2 * 2 * 16
    assert storage[1].count_nonzero() == 2 * 2 * 16
