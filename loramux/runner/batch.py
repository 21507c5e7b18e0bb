"""The tensors of a step: tokens, positions and KV pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.kernels.gpu.transfer import send
from loramux.kernels.ops import AttendArgs, AttentionPlan, SequenceRows
from loramux.runner.row_uses import RowUses
from loramux.types.step import Chunk

LogitsOf = Callable[[Tensor, Sequence[int]], Tensor]
"""Computes logits from the hidden states of these rows of a step."""

# Above this fraction of the tokens, selecting rows costs more than it saves.
_MAX_SELECTED_FRACTION = 0.75


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of a step, one row each, chunk by chunk."""

    chunks: tuple[Chunk, ...]
    """In row order."""
    row_starts: tuple[int, ...]
    token_ids: Tensor
    positions: Tensor
    uses: RowUses

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def rows(self, index: int) -> range:
        start = self.row_starts[index]
        return range(start, start + len(self.chunks[index].token_ids))

    @property
    def sequences(self) -> list[SequenceRows]:
        return [
            SequenceRows(start, len(chunk.token_ids), chunk.start, chunk.page_ids)
            for start, chunk in zip(self.row_starts, self.chunks, strict=True)
        ]


def build_batch(chunks: Sequence[Chunk], device: torch.device) -> StepBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    row_starts: list[int] = []
    for chunk in chunks:
        row_starts.append(len(token_ids))
        token_ids += chunk.token_ids
        positions += range(chunk.start, chunk.start + len(chunk.token_ids))
    rows = send(torch.tensor([token_ids, positions]), device)
    return StepBatch(
        chunks=tuple(chunks),
        row_starts=tuple(row_starts),
        token_ids=rows[0],
        positions=rows[1],
        uses=RowUses.of(chunks),
    )


class PagedAttention:
    """The decoder's attention context over pages, by the index tensors of one step."""

    def __init__(self, plan: AttentionPlan, storage: Tensor) -> None:
        self._plan = plan
        self._storage = storage

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._plan.write_kv(self._storage, layer, k, v)

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        return self._plan.attend(self._storage, q, args)


def half_filled_pages(chunks: Sequence[Chunk], block_tokens: int) -> list[int]:
    """Return the pages that the step starts but does not fill."""
    pages = []
    for chunk in chunks:
        stop = chunk.start + len(chunk.token_ids)
        last, filled = divmod(stop, block_tokens)
        if filled and last * block_tokens >= chunk.start:
            pages.append(chunk.page_ids[last])
    return pages


def selected_rows(batch: StepBatch) -> list[int] | None:
    """Return the rows that are read if it is worth to leave out the others; None for all rows."""
    rows = batch.uses.rows
    return rows if len(rows) < _MAX_SELECTED_FRACTION * batch.num_rows else None


def vanished_rows(hidden: Tensor) -> list[int]:
    """Return the rows of zeros: the RMSNorm of values whose squares overflow. hidden [rows, hidden]

    Their logits are finite, and mean nothing.
    """
    found: list[int] = (hidden.abs().amax(dim=-1) == 0).nonzero().squeeze(1).tolist()
    return found
