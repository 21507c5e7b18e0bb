"""The GPU's attention, in Triton's interpreter, against the reference."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.attention import ops as attention_triton
from loramux.kernels.ops import AttendArgs, SequenceRows  # noqa: E402
from loramux.kernels.reference import attention as attention_torch
from loramux.types.kv import KVLayout  # noqa: E402
from tests.attention_factory import MIXED_DTYPES  # noqa: E402

DEVICE = torch.device(os.environ.get("LORAMUX_TEST_DEVICE", "cpu"))
NUM_HEADS = 6
MIXES = {
    "one token": [(0, 1)],
    "whole prompts": [(0, 7), (0, 33)],
    "later chunks": [(5, 7), (33, 4)],
    "decodes of very different length": [(2, 1), (130, 1), (20, 1)],
    "prompts among decodes": [(9, 1), (0, 6), (20, 1), (4, 9)],
}
ARGS = {
    "plain": AttendArgs(layer=0, scale=0.35),
    "window": AttendArgs(layer=2, scale=0.35, sliding_window=5),
    "softcap": AttendArgs(layer=1, scale=0.5, softcap=2.0),
}


def make_layout(head_dim: int = 16, block_tokens: int = 16) -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=2, head_dim=head_dim, block_tokens=block_tokens)


def make_storage(num_pages: int, layout: KVLayout, fill: float = float("nan")) -> torch.Tensor:
    """Unwritten KV is NaN, so that reading it shows."""
    size = 2 * layout.block_tokens * layout.num_kv_heads * layout.head_dim
    return torch.full((num_pages, layout.num_layers * size), fill)


def make_sequences(mix: list[tuple[int, int]], layout: KVLayout) -> tuple[list[SequenceRows], int]:
    needed = [-(-(start + rows) // layout.block_tokens) for start, rows in mix]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(0)).tolist()
    sequences, row = [], 0
    for (start, rows), num_pages in zip(mix, needed, strict=True):
        page_ids, order = order[:num_pages], order[num_pages:]
        sequences.append(SequenceRows(row, rows, start, page_ids))
        row += rows
    return sequences, sum(needed) + 3


def fill_pages(
    storage: torch.Tensor, sequences: list[SequenceRows], layout: KVLayout, layer: int
) -> None:
    """Random keys and values for the tokens of earlier steps."""
    earlier = [SequenceRows(0, s.position_start, 0, s.page_ids) for s in sequences]
    for sequence in earlier:
        shape = (sequence.num_rows, layout.num_kv_heads, layout.head_dim)
        plan = attention_torch.plan([sequence], layout, DEVICE)
        plan.write_kv(storage, layer, torch.randn(shape), torch.randn(shape))


def check(
    mix: list[tuple[int, int]],
    args: AttendArgs,
    layout: KVLayout,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> None:
    torch.manual_seed(0)
    sequences, num_pages = make_sequences(mix, layout)
    storage = make_storage(num_pages, layout)
    fill_pages(storage, sequences, layout, args.layer)
    storage = storage.to(kv_dtype or dtype)
    num_rows = sum(rows for _, rows in mix)
    # With gaps between rows, as the decoder hands them over.
    qkv = torch.randn(num_rows, NUM_HEADS + 4, layout.head_dim).to(dtype)
    q, k, v = qkv.split([NUM_HEADS, 2, 2], dim=1)
    outs = []
    for kernels in (attention_torch, attention_triton):
        own = storage.clone()
        plan = kernels.plan(sequences, layout, DEVICE)
        plan.write_kv(own, args.layer, k, v)
        outs.append((plan.attend(own, q, args), own))
    limit = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 0}
    if torch.bfloat16 in (dtype, kv_dtype):
        # The interpreter cuts float32 off instead of rounding it.
        limit = {"atol": 2e-2, "rtol": 1e-2}
        torch.testing.assert_close(outs[0][1], outs[1][1], atol=0, rtol=2**-7, equal_nan=True)
    else:
        assert torch.equal(outs[0][1].nan_to_num(), outs[1][1].nan_to_num())
    torch.testing.assert_close(outs[1][0], outs[0][0], **limit)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_equals_the_reference(mix: list[tuple[int, int]]) -> None:
    check(mix, ARGS["plain"], make_layout())


@pytest.mark.parametrize("args", [ARGS["window"], ARGS["softcap"]], ids=["window", "softcap"])
def test_windows_and_softcaps_equal_the_reference(args: AttendArgs) -> None:
    check(MIXES["prompts among decodes"], args, make_layout())


@pytest.mark.parametrize("block_tokens", [4, 32])
def test_pages_may_be_smaller_or_larger_than_a_tile(block_tokens: int) -> None:
    check(MIXES["prompts among decodes"], ARGS["plain"], make_layout(block_tokens=block_tokens))


def test_a_head_dim_between_powers_of_two() -> None:
    check(MIXES["later chunks"], ARGS["plain"], make_layout(head_dim=48))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(dtype, getattr(torch, kv)) for dtype, kv in MIXED_DTYPES], ids=str
)
@pytest.mark.parametrize("mix", ["later chunks", "prompts among decodes"])
def test_a_kv_cache_of_another_dtype(mix: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(MIXES[mix], ARGS["plain"], make_layout(), dtype, kv_dtype)


def test_sixteen_bits() -> None:
    check(MIXES["prompts among decodes"], ARGS["plain"], make_layout(), torch.float16)


@pytest.mark.parametrize("window", [None, 20])
def test_a_decode_plan_follows_the_lengths_on_the_device(window: int | None) -> None:
    """As a CUDA graph replays it: other lengths each time, and rows that are padding."""
    torch.manual_seed(0)
    layout = make_layout()
    args = AttendArgs(layer=1, scale=0.3, sliding_window=window)
    pages = torch.randperm(3 * 6).int().view(3, 6)
    storage = make_storage(3 * 6, layout).normal_()
    q = torch.randn(3, NUM_HEADS, layout.head_dim)
    plan = attention_triton.plan_decodes(pages, layout, q, (window,))
    for lengths in ([90, 0, 16], [1, 70, 0]):
        plan.partition(torch.tensor(lengths, dtype=torch.int32))
        # Reading it waits, as attend needs another kernel ahead of it.
        assert [slot < 0 for slot in plan.slots.tolist()] == [n == 0 for n in lengths]
        actual = plan.attend(storage, q, args)
        rows = [i for i, length in enumerate(lengths) if length]
        sequences = [SequenceRows(i, 1, lengths[i] - 1, pages[i].tolist()) for i in rows]
        expected = attention_torch.plan(sequences, layout, DEVICE).attend(storage, q, args)
        torch.testing.assert_close(actual[rows], expected[rows], atol=2e-5, rtol=1e-4)


def test_counters_of_cut_spans_are_back_at_zero() -> None:
    """Else the next layer would add up results that are not there yet."""
    layout = make_layout()
    pages = torch.arange(20, dtype=torch.int32).view(1, 20)
    q = torch.randn(1, NUM_HEADS, layout.head_dim)
    plan = attention_triton.plan_decodes(pages, layout, q)
    plan.partition(torch.tensor([300], dtype=torch.int32))
    (work,) = plan.work[None]
    assert work.items[0, 6] > 1
    plan.attend(make_storage(20, layout).normal_(), q, ARGS["plain"])
    assert work.semaphores is not None
    assert work.semaphores.count_nonzero() == 0
