"""The fast CPU attention against the reference, over mixes of prompts and decodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.kernels import attention_cpu, attention_torch
from loramux.kernels.interface import AttendArgs, PagedLayout, SequenceRows

LAYOUT = PagedLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=4)
PAGE = 3 * 2 * 4 * 2 * 8
NUM_HEADS = 6
CPU = torch.device("cpu")

MIXES = {
    "one token": [(0, 1)],
    "whole prompts": [(0, 7), (0, 4), (0, 13)],
    "later chunks": [(5, 7), (8, 4)],
    "decodes of like length": [(9, 1), (10, 1), (12, 1)],
    "decodes of very different length": [(2, 1), (300, 1), (70, 1), (299, 1)],
    "prompts among decodes": [(9, 1), (0, 6), (30, 1), (4, 9), (3, 1)],
}


def make_sequences(mix: list[tuple[int, int]], seed: int = 0) -> tuple[list[SequenceRows], int]:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(start + rows) // LAYOUT.block_tokens) for start, rows in mix]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    sequences, row = [], 0
    for (start, rows), num_pages in zip(mix, needed, strict=True):
        page_ids, order = order[:num_pages], order[num_pages:]
        sequences.append(SequenceRows(row, rows, start, page_ids))
        row += rows
    return sequences, sum(needed) + 3


def run(kernels: object, mix: list[tuple[int, int]], args: AttendArgs) -> tuple[torch.Tensor, ...]:
    sequences, num_pages = make_sequences(mix)
    generator = torch.Generator().manual_seed(3)
    storage = torch.randn(num_pages, PAGE, generator=generator)
    num_rows = sum(rows for _, rows in mix)
    q = torch.randn(num_rows, NUM_HEADS, 8, generator=generator)
    k, v = (torch.randn(num_rows, 2, 8, generator=generator) for _ in range(2))
    plan = kernels.plan(sequences, LAYOUT, CPU)  # type: ignore[attr-defined]
    kernels.write_kv(storage, plan, args.layer, k, v)  # type: ignore[attr-defined]
    return kernels.attend(storage, plan, q, args), storage  # type: ignore[attr-defined]


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize(
    "args",
    [
        AttendArgs(layer=0, scale=0.35),
        AttendArgs(layer=2, scale=0.35, sliding_window=5),
        AttendArgs(layer=1, scale=0.5, softcap=2.0),
    ],
    ids=["plain", "window", "softcap"],
)
def test_equals_the_reference(mix: list[tuple[int, int]], args: AttendArgs) -> None:
    expected, expected_storage = run(attention_torch, mix, args)
    actual, actual_storage = run(attention_cpu, mix, args)
    assert torch.equal(actual_storage, expected_storage)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    mix=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
def test_any_mix_equals_the_reference(mix: list[tuple[int, int]], window: int | None) -> None:
    args = AttendArgs(layer=1, scale=0.35, sliding_window=window)
    expected, _ = run(attention_torch, mix, args)
    actual, _ = run(attention_cpu, mix, args)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


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
        attention_cpu.write_kv(storage, plan, 0, k[rows], v[rows])
        out = attention_cpu.attend(storage, plan, q[rows], args)
        torch.testing.assert_close(together[rows], out, atol=1e-5, rtol=1e-4)
