"""The compiled attention against the reference, over mixes of prompts and decodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="no numba on this machine")

from loramux.kernels import attention_numba
from loramux.kernels.interface import AttendArgs, SequenceRows
from tests.attention_factory import (
    ARGS,
    CPU,
    LAYOUT,
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


@settings(max_examples=40, deadline=None)
@given(
    mix=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
def test_any_mix_equals_the_reference(mix: list[tuple[int, int]], window: int | None) -> None:
    args = AttendArgs(layer=1, scale=0.35, sliding_window=window)
    check_against_reference(attention_numba, mix, args)


def test_a_decode_has_the_same_bits_alone_and_among_others() -> None:
    sequences, num_pages = make_sequences([(20 + i, 1) for i in range(40)])
    storage, args = torch.randn(num_pages, PAGE), AttendArgs(layer=0, scale=0.35)
    q = torch.randn(40, NUM_HEADS, 8)
    plan = attention_numba.plan(sequences, LAYOUT, CPU)
    together = attention_numba.attend(storage, plan, q, args)
    for row, sequence in enumerate(sequences):
        alone = SequenceRows(0, 1, sequence.position_start, sequence.page_ids)
        plan = attention_numba.plan([alone], LAYOUT, CPU)
        out = attention_numba.attend(storage, plan, q[row : row + 1], args)
        assert torch.equal(out[0], together[row])


def test_queries_may_have_keys_and_values_between_their_rows() -> None:
    sequences, num_pages = make_sequences([(9, 1), (14, 1)])
    storage, args = torch.randn(num_pages, PAGE), AttendArgs(layer=0, scale=0.35)
    qkv = torch.randn(2, NUM_HEADS + 4, 8)
    plan = attention_numba.plan(sequences, LAYOUT, CPU)
    q = qkv[:, :NUM_HEADS]
    expected = attention_numba.attend(storage, plan, q.contiguous(), args)
    assert torch.equal(attention_numba.attend(storage, plan, q, args), expected)


def test_what_an_earlier_owner_left_in_the_last_page_is_never_read() -> None:
    sequences, num_pages = make_sequences([(9, 1)])
    storage, args = torch.randn(num_pages, PAGE), AttendArgs(layer=0, scale=0.35)
    q = torch.randn(1, NUM_HEADS, 8)
    plan = attention_numba.plan(sequences, LAYOUT, CPU)
    expected = attention_numba.attend(storage, plan, q, args)
    pages = storage.view(num_pages, 3, 2, 4, 16)
    pages[sequences[0].page_ids[2], :, :, 2:] = float("nan")
    assert torch.equal(attention_numba.attend(storage, plan, q, args), expected)
