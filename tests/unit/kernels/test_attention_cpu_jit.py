"""The compiled attention against the reference, over mixes of prompts and decodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="no numba on this machine")

from loramux.kernels.cpu_jit import attention as attention_numba
from loramux.kernels.cpu_jit.attention_tiles import MIX_WIDTH
from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.kernels.reference import attention as attention_torch
from loramux.types.kv import KVLayout
from tests.attention_factory import (
    ARGS,
    CPU,
    LAYOUT,
    MIXED_DTYPES,
    MIXES,
    NUM_HEADS,
    PAGE,
    check_against_reference,
    make_sequences,
)

LONG_MIXES = {
    **MIXES,
    "a long prompt": [(0, 200)],
    "a chunk of a long prompt among decodes": [(9, 1), (150, 20), (30, 1), (0, 6)],
}


@pytest.mark.parametrize("mix", LONG_MIXES.values(), ids=LONG_MIXES)
@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_equals_the_reference(mix: list[tuple[int, int]], args: AttendArgs) -> None:
    check_against_reference(attention_numba, mix, args)


@pytest.mark.parametrize("dtypes", MIXED_DTYPES[:2], ids=str)
@pytest.mark.parametrize("mix", LONG_MIXES.values(), ids=LONG_MIXES)
def test_a_kv_cache_of_another_dtype(
    mix: list[tuple[int, int]], dtypes: tuple[torch.dtype, str]
) -> None:
    check_against_reference(attention_numba, mix, ARGS["window"], dtypes)


@settings(max_examples=40, deadline=None)
@given(
    mix=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
def test_any_mix_equals_the_reference(mix: list[tuple[int, int]], window: int | None) -> None:
    args = AttendArgs(layer=1, scale=0.35, sliding_window=window)
    check_against_reference(attention_numba, mix, args)


@pytest.mark.parametrize("block_tokens", [1, 3, 8])
@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_heads_of_whole_tiles_equal_the_reference(args: AttendArgs, block_tokens: int) -> None:
    layout = KVLayout(3, num_kv_heads=2, head_dim=MIX_WIDTH, block_tokens=block_tokens)
    mix = [(9, 1), (0, 6), (30, 1), (4, 9), (3, 1), (0, 1)]
    sequences, page, row = [], 0, 0
    for start, rows in mix:
        num_pages = -(-(start + rows) // block_tokens)
        sequences.append(SequenceRows(row, rows, start, range(page, page + num_pages)))
        page, row = page + num_pages, row + rows
    storage = torch.full((page, 3 * 2 * block_tokens * 2 * MIX_WIDTH), float("nan"))
    everything = [SequenceRows(0, s.num_tokens, 0, s.page_ids) for s in sequences]
    for sequence in everything:
        k, v = torch.randn(2, sequence.num_tokens, 2, MIX_WIDTH)
        plan = attention_torch.plan([sequence], layout, CPU)
        plan.write_kv(storage, args.layer, k, v)
    q = torch.randn(row, NUM_HEADS, MIX_WIDTH)
    expected, actual = (
        kernels.plan(sequences, layout, CPU).attend(storage, q, args)
        for kernels in (attention_torch, attention_numba)
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_a_decode_has_the_same_bits_alone_and_among_others() -> None:
    sequences, num_pages = make_sequences([(20 + i, 1) for i in range(40)])
    storage, args = torch.randn(num_pages, PAGE), AttendArgs(layer=0, scale=0.35)
    q = torch.randn(40, NUM_HEADS, 8)
    plan = attention_numba.plan(sequences, LAYOUT, CPU)
    together = plan.attend(storage, q, args)
    for row, sequence in enumerate(sequences):
        alone = SequenceRows(0, 1, sequence.position_start, sequence.page_ids)
        plan = attention_numba.plan([alone], LAYOUT, CPU)
        out = plan.attend(storage, q[row : row + 1], args)
        assert torch.equal(out[0], together[row])


def test_queries_may_have_keys_and_values_between_their_rows() -> None:
    sequences, num_pages = make_sequences([(9, 1), (14, 1)])
    storage, args = torch.randn(num_pages, PAGE), AttendArgs(layer=0, scale=0.35)
    qkv = torch.randn(2, NUM_HEADS + 4, 8)
    plan = attention_numba.plan(sequences, LAYOUT, CPU)
    q = qkv[:, :NUM_HEADS]
    expected = plan.attend(storage, q.contiguous(), args)
    assert torch.equal(plan.attend(storage, q, args), expected)


def test_what_an_earlier_owner_left_in_the_last_page_is_never_read() -> None:
    sequences, num_pages = make_sequences([(9, 1)])
    storage, args = torch.randn(num_pages, PAGE), AttendArgs(layer=0, scale=0.35)
    q = torch.randn(1, NUM_HEADS, 8)
    plan = attention_numba.plan(sequences, LAYOUT, CPU)
    expected = plan.attend(storage, q, args)
    pages = storage.view(num_pages, 3, 2, 4, 16)
    pages[sequences[0].page_ids[2], :, :, 2:] = float("nan")
    assert torch.equal(plan.attend(storage, q, args), expected)
