"""The fast CPU attention against the reference, over mixes of prompts and decodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.kernels.cpu import attention as attention_cpu
from loramux.kernels.ops import AttendArgs, SequenceRows
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
    run,
)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_equals_the_reference(mix: list[tuple[int, int]], args: AttendArgs) -> None:
    check_against_reference(attention_cpu, mix, args)


@pytest.mark.parametrize("dtypes", MIXED_DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_kv_cache_of_another_dtype(
    mix: list[tuple[int, int]], dtypes: tuple[torch.dtype, str]
) -> None:
    check_against_reference(attention_cpu, mix, ARGS["window"], dtypes)


@settings(max_examples=40, deadline=None)
@given(
    mix=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
def test_any_mix_equals_the_reference(mix: list[tuple[int, int]], window: int | None) -> None:
    args = AttendArgs(layer=1, scale=0.35, sliding_window=window)
    check_against_reference(attention_cpu, mix, args)


def test_a_row_never_sees_another_sequence() -> None:
    mix = MIXES["prompts among decodes"]
    args = AttendArgs(layer=0, scale=0.35)
    together, _ = run(attention_cpu, mix, args)
    sequences, num_pages = make_sequences(mix)
    generator = torch.Generator().manual_seed(3)
    storage = torch.randn(num_pages, PAGE, generator=generator)
    num_rows = sum(rows for _, rows in mix)
    q = torch.randn(num_rows, NUM_HEADS, 8, generator=generator)
    k, v = (torch.randn(num_rows, 2, 8, generator=generator) for _ in range(2))
    for sequence in sequences:
        rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
        alone = SequenceRows(0, sequence.num_rows, sequence.position_start, sequence.page_ids)
        plan = attention_cpu.plan([alone], LAYOUT, CPU)
        plan.write_kv(storage, 0, k[rows], v[rows])
        out = plan.attend(storage, q[rows], args)
        torch.testing.assert_close(together[rows], out, atol=1e-5, rtol=1e-4)
