"""Attention with torch's SDPA: decodes of similar length share one call, prefill chunks do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.types.kv import KVLayout

# Sequences are padded to the longest of their group, so a group's lengths stay within this factor.
_LENGTH_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend together: all with the same number of rows."""

    rows: Tensor | slice
    num_sequences: int
    rows_each: int
    starts: Tensor
    """[sequences] position of each sequence's first row."""
    page_rows: Tensor
    """[sequences * pages] layer 0's keys, as rows of the storage as [pages * layers * 2, block]."""
    num_tokens: int
    """Tokens that page_rows cover for each sequence."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Additive [sequences, 1, repeat * rows, tokens], by sliding window."""


@dataclass(frozen=True, slots=True)
class Plan:
    groups: tuple[Group, ...]
    write_rows: Tensor
    """[rows] layer 0's keys, as rows of [pages * layers * 2 * block, heads * dim]."""
    layout: KVLayout

    def write_kv(self, storage: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's keys and values in their pages."""
        layout = self.layout
        tokens = storage.view(-1, layout.num_kv_heads * layout.head_dim)
        first = layer * 2 * layout.block_tokens
        k, v = (x.flatten(1).to(storage.dtype) for x in (k, v))
        tokens[first:].index_copy_(0, self.write_rows, k)
        tokens[first + layout.block_tokens :].index_copy_(0, self.write_rows, v)

    def attend(self, storage: Tensor, q: Tensor, args: AttendArgs) -> Tensor:
        """Row i attends to its own sequence's tokens up to itself: softmax(q K^T * scale) V."""
        num_rows, num_heads, head_dim = q.shape
        if len(self.groups) == 1 and isinstance(self.groups[0].rows, slice):
            return _attend_group(storage, self, self.groups[0], q, args)
        out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
        self.attend_into(out, storage, q, args)
        return out

    def attend_into(self, out: Tensor, storage: Tensor, q: Tensor, args: AttendArgs) -> None:
        """`attend` into `out`; rows of other sequences are untouched."""
        for group in self.groups:
            out[group.rows] = _attend_group(storage, self, group, q[group.rows], args)


def plan(sequences: Sequence[SequenceRows], layout: KVLayout, device: torch.device) -> Plan:
    block = layout.block_tokens
    page_stride = layout.num_layers * 2 * block
    write_rows = [
        sequence.page_ids[position // block] * page_stride + position % block
        for sequence in sequences
        for position in range(sequence.position_start, sequence.num_tokens)
    ]
    return Plan(
        groups=tuple(_group(members, layout, device) for members in _split(sequences)),
        write_rows=torch.tensor(write_rows, device=device),
        layout=layout,
    )


def _attend_group(storage: Tensor, plan: Plan, group: Group, q: Tensor, args: AttendArgs) -> Tensor:
    layout = plan.layout
    kv_heads, dim = layout.num_kv_heads, layout.head_dim
    num_sequences, rows = group.num_sequences, group.rows_each
    repeat = q.shape[1] // kv_heads
    blocks = storage.view(-1, layout.block_tokens * kv_heads * dim)
    shape = (num_sequences, group.num_tokens, kv_heads, dim)
    # Heads that share keys become rows of one query, so that keys are never repeated.
    dtype = torch.promote_types(q.dtype, storage.dtype)
    k, v = (blocks[2 * args.layer + i :].index_select(0, group.page_rows).to(dtype) for i in (0, 1))
    k, v = (x.view(shape).transpose(1, 2) for x in (k, v))
    result_dtype, q = q.dtype, q.to(dtype)
    q = q.view(num_sequences, rows, kv_heads, repeat, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(num_sequences, kv_heads, repeat * rows, dim)
    mask = _mask(group, args.sliding_window, repeat, q)
    if args.softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=args.scale)
    else:
        scores = torch.matmul(q, k.transpose(2, 3)).mul_(args.scale / args.softcap)
        scores = scores.tanh_().mul_(args.softcap).add_(mask)
        out = torch.matmul(scores.softmax(-1), v)
    out = out.view(num_sequences, kv_heads, repeat, rows, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_sequences * rows, -1).to(result_dtype)


def _mask(group: Group, window: int | None, repeat: int, like: Tensor) -> Tensor:
    """Additive [sequences, 1, repeat * rows, tokens], made once a step for each window in use."""
    mask = group.masks.get(window)
    if mask is None:
        device = like.device
        key = torch.arange(group.num_tokens, device=device)
        query = group.starts[:, None] + torch.arange(group.rows_each, device=device)
        visible = key <= query[:, :, None]
        if window is not None:
            visible &= key > query[:, :, None] - window
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=device)
        mask.masked_fill_(~visible, float("-inf"))
        mask = mask.repeat(1, repeat, 1)[:, None]
        group.masks[window] = mask
    return mask


def _split(sequences: Sequence[SequenceRows]) -> list[list[SequenceRows]]:
    """Group decoding sequences by length within _LENGTH_SPREAD; other sequences stay alone."""
    groups = [[sequence] for sequence in sequences if sequence.num_rows > 1]
    decoding = sorted((s for s in sequences if s.num_rows == 1), key=lambda s: s.num_tokens)
    group: list[SequenceRows] = []
    for sequence in decoding:
        if group and sequence.num_tokens > max(64, group[0].num_tokens * _LENGTH_SPREAD):
            groups.append(sorted(group, key=lambda s: s.row_start))
            group = []
        group.append(sequence)
    if group:
        groups.append(sorted(group, key=lambda s: s.row_start))
    return groups


def _group(members: list[SequenceRows], layout: KVLayout, device: torch.device) -> Group:
    num_pages = max(-(-member.num_tokens // layout.block_tokens) for member in members)
    stride = layout.num_layers * 2
    page_rows: list[int] = []
    for member in members:
        # Pages that it has not begun may hold NaN, which a mask of weight 0 does not remove.
        page_ids = list(member.page_ids[: -(-member.num_tokens // layout.block_tokens)])
        page_ids += page_ids[:1] * (num_pages - len(page_ids))
        page_rows += [page_id * stride for page_id in page_ids]
    rows = [m.row_start + i for m in members for i in range(m.num_rows)]
    is_run = rows == list(range(rows[0], rows[0] + len(rows)))
    return Group(
        rows=slice(rows[0], rows[-1] + 1) if is_run else torch.tensor(rows, device=device),
        num_sequences=len(members),
        rows_each=members[0].num_rows,
        starts=torch.tensor([m.position_start for m in members], device=device),
        page_rows=torch.tensor(page_rows, device=device),
        num_tokens=num_pages * layout.block_tokens,
    )
