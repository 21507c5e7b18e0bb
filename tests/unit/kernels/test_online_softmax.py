"""Decode steps: the running softmax scales late, and reads nothing that was not written."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.attention import ops as attention_triton
from loramux.kernels.gpu.attention.online_softmax import load_q_fragment  # noqa: E402
from loramux.kernels.gpu.attention.ops import Tiles  # noqa: E402
from loramux.kernels.ops import AttendArgs, SequenceRows  # noqa: E402
from loramux.kernels.reference import attention as attention_torch
from loramux.types.kv import KVLayout  # noqa: E402

DEVICE = torch.device(os.environ.get("LORAMUX_TEST_DEVICE", "cpu"))
LENGTHS = [1, 16, 17, 47, 64, 90]
WIDTH = 6


def pages_of(storage: Tensor, layout: KVLayout) -> Tensor:
    """Return a view: [pages, layers, keys and values, tokens, heads, dim]"""
    return storage.view(
        -1, layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim
    )


def decode(
    storage: Tensor, layout: KVLayout, q: Tensor, args: AttendArgs, atol: float = 2e-5
) -> Tensor:
    pages = torch.randperm(len(LENGTHS) * WIDTH).int().view(-1, WIDTH)
    tokens = pages_of(storage, layout)
    # What no token was written to may hold anything.
    for length, own in zip(LENGTHS, pages.tolist(), strict=True):
        for place, page in enumerate(own):
            written = min(max(length - place * layout.block_tokens, 0), layout.block_tokens)
            tokens[page, :, :, written:] = torch.nan
    plan = attention_triton.plan_decodes(pages, layout, q, (args.sliding_window,))
    plan.partition(torch.tensor(LENGTHS, dtype=torch.int32))
    # Reading it waits, as attend needs another kernel ahead of it.
    assert all(slot >= 0 for slot in plan.slots.tolist())
    found = plan.attend(storage, q, args)
    sequences = [
        SequenceRows(i, 1, length - 1, own)
        for i, (length, own) in enumerate(zip(LENGTHS, pages.tolist(), strict=True))
    ]
    reference = attention_torch.plan(sequences, layout, DEVICE)
    wanted = reference.attend(storage.nan_to_num(0.0), q, args)
    torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-4)
    return found


@triton.jit
def _read_q(q, out, count, stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out + at, load_q_fragment(q, count, stride, GROUP, HEAD_DIM))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("group", "num_tokens"), [(4, 1), (4, 4), (1, 5), (3, 5), (8, 2), (16, 1)])
def test_q_has_its_rows_and_zeros(group: int, num_tokens: int, head_dim: int) -> None:
    """GROUP heads of each token, which have others beside them."""
    q = torch.randn(num_tokens, 3 * group * head_dim)
    out = torch.full((16, head_dim), torch.nan)
    _read_q[(1,)](q, out, num_tokens * group, q.stride(0), group, head_dim)
    wanted = q[:, : group * head_dim].reshape(-1, head_dim)
    assert torch.equal(out[: len(wanted)], wanted)
    assert not out[len(wanted) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("num_tiles", [1, 2])
@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 2, 24)])
@pytest.mark.parametrize(
    "args", [AttendArgs(layer=0, scale=0.3), AttendArgs(layer=1, scale=0.3, softcap=20.0)]
)
def test_what_was_not_written_does_not_count(  # noqa: PLR0913
    num_tiles: int,
    block_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    args: AttendArgs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a weight of 0 times what is NaN."""
    tiles = Tiles(16, 16, 64, 1, 5, 2, num_tiles=num_tiles)
    monkeypatch.setattr(attention_triton, "decode_tiles", lambda *_, **__: tiles)
    torch.manual_seed(3)
    layout = KVLayout(2, num_kv_heads, head_dim, block_tokens)
    storage = torch.randn(len(LENGTHS) * WIDTH, 4 * block_tokens * num_kv_heads * head_dim)
    decode(storage, layout, torch.randn(len(LENGTHS), num_heads, head_dim), args)


@pytest.mark.parametrize("growth", [0.0, 0.02, 0.2, 3.0, -3.0])
def test_scores_may_grow_and_shrink_along_a_sequence(growth: float) -> None:
    """By less than what is scaled late, by more, and by more than a float32 has room for."""
    torch.manual_seed(4)
    layout = KVLayout(1, 2, 16, 16)
    storage = torch.randn(len(LENGTHS) * WIDTH, 2 * 16 * 2 * 16)
    q = torch.randn(len(LENGTHS), 4, 16).abs()
    # All scores of a page grow with its number, whose order in a sequence is any.
    number = torch.arange(len(storage), dtype=torch.float32)
    pages_of(storage, layout)[:, :, 0] += (growth * number)[:, None, None, None, None]
    # Scores of some thousands are exact to 1e-4.
    found = decode(storage, layout, q, AttendArgs(layer=0, scale=1.0), atol=3e-4)
    assert bool(found.isfinite().all())
