"""Mixes of prompts and decodes over pages, for every kind of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.kernels.reference import attention as attention_torch
from loramux.types.kv import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=4)
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

# Activations and KV cache of different dtypes.
MIXED_DTYPES = [
    (torch.float32, "float16"),
    (torch.float32, "bfloat16"),
    (torch.bfloat16, "float16"),
    (torch.bfloat16, "float32"),
]
ARGS = {
    "plain": AttendArgs(layer=0, scale=0.35),
    "window": AttendArgs(layer=2, scale=0.35, sliding_window=5),
    "softcap": AttendArgs(layer=1, scale=0.5, softcap=2.0),
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


def run(
    kernels: Any,
    mix: list[tuple[int, int]],
    args: AttendArgs,
    dtypes: tuple[torch.dtype, str] = (torch.float32, "float32"),
) -> tuple[torch.Tensor, ...]:
    """`dtypes`: of the activations, and of the KV cache"""
    sequences, num_pages = make_sequences(mix)
    generator = torch.Generator().manual_seed(3)
    layout = replace(LAYOUT, dtype=dtypes[1])
    storage = torch.randn(num_pages, PAGE, generator=generator).to(getattr(torch, dtypes[1]))
    num_rows = sum(rows for _, rows in mix)
    q = torch.randn(num_rows, NUM_HEADS, 8, generator=generator)
    k, v = (torch.randn(num_rows, 2, 8, generator=generator) for _ in range(2))
    q, k, v = (x.to(dtypes[0]) for x in (q, k, v))
    plan = kernels.plan(sequences, layout, CPU)
    plan.write_kv(storage, args.layer, k, v)
    return plan.attend(storage, q, args), storage


def check_against_reference(
    kernels: Any,
    mix: list[tuple[int, int]],
    args: AttendArgs,
    dtypes: tuple[torch.dtype, str] = (torch.float32, "float32"),
) -> None:
    expected, expected_storage = run(attention_torch, mix, args, dtypes)
    actual, actual_storage = run(kernels, mix, args, dtypes)
    assert torch.equal(actual_storage, expected_storage)
    atol = 1e-5 if dtypes[0] == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-4)


def random_angles(num_rows: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as rotations have them, but of no angle: [num_rows, head_dim] each"""
    cos, sin = torch.randn(2, num_rows, head_dim // 2)
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
