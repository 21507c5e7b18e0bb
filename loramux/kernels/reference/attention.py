"""Reference: attention of each sequence by itself, with an explicit mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.types.kv import KVLayout


@dataclass(frozen=True, slots=True)
class Plan:
    sequences: tuple[SequenceRows, ...]
    layout: KVLayout

    def write_kv(self, storage: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's keys and values in their pages."""
        pages = _pages(storage, self.layout)
        block = self.layout.block_tokens
        for sequence in self.sequences:
            for i in range(sequence.num_rows):
                page, token = divmod(sequence.position_start + i, block)
                # Converted to the dtype of the pages.
                pages[sequence.page_ids[page], layer, 0, token] = k[sequence.row_start + i]
                pages[sequence.page_ids[page], layer, 1, token] = v[sequence.row_start + i]

    def attend(self, storage: Tensor, q: Tensor, args: AttendArgs) -> Tensor:
        """Row i attends to its own sequence's tokens up to itself: softmax(q K^T * scale) V."""
        pages = _pages(storage, self.layout)
        num_rows, num_heads, head_dim = q.shape
        out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
        q = q.to(torch.promote_types(q.dtype, storage.dtype))
        repeat = num_heads // self.layout.num_kv_heads
        for sequence in self.sequences:
            kv = pages[list(sequence.page_ids), args.layer].to(q.dtype)
            k, v = (
                kv[:, i].reshape(-1, self.layout.num_kv_heads, head_dim)[: sequence.num_tokens]
                for i in (0, 1)
            )
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
            scores = torch.einsum("qhd,khd->hqk", q[rows], k).float() * args.scale
            if args.softcap is not None:
                scores = args.softcap * torch.tanh(scores / args.softcap)
            scores.masked_fill_(~_visible(sequence, args.sliding_window, q.device), float("-inf"))
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(q.dtype), v)
        return out.view(num_rows, num_heads * head_dim)


def plan(sequences: Sequence[SequenceRows], layout: KVLayout, device: torch.device) -> Plan:
    return Plan(sequences=tuple(sequences), layout=layout)


def _visible(sequence: SequenceRows, window: int | None, device: torch.device) -> Tensor:
    """[rows, tokens]: whether the row may attend to the token."""
    key = torch.arange(sequence.num_tokens, device=device)
    query = torch.arange(sequence.position_start, sequence.num_tokens, device=device)[:, None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _pages(storage: Tensor, layout: KVLayout) -> Tensor:
    """[pages, layers, 2, block, kv heads, dim]"""
    shape = (layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
    return storage[:, : layout.num_elements].view(-1, *shape)
