"""Fast on a CPU: all adapters of a stack in batched products, at true ranks, no weight copied.

Every way rounds at the same places (x @ a, its weight, the product with b, the sum), so that in
bfloat16 and float16 a row does not depend on the mix that chose the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loramux.kernels.linear import product
from loramux.kernels.ops import LoraRows, LoraWeights, Segment, StackedRows
from loramux.kernels.segments import rounds_of

# Longer segments fill a matrix product by themselves; padding the others to them would cost more.
_LONG_SEGMENT = 16

READS_ADDRESSES = False


def cut_rows(segments: Sequence[Segment], num_slots: int) -> LoraRows:
    """Cuts each round of segments without common rows for itself; most steps have one round."""
    rows: LoraRows | None = None
    for members in reversed(rounds_of(segments)):
        rows = replace(_cut_round(members, num_slots), then=rows)
    assert rows is not None, "a stack without segments is left out"
    return rows


def _cut_round(segments: Sequence[Segment], num_slots: int) -> LoraRows:
    lengths = {segment.stop - segment.start for segment in segments}
    is_even = len(lengths) == 1 and _is_one_run(segments, num_slots)
    if is_even:
        return LoraRows(segments=tuple(segments), stacked=_stack(segments, num_slots))
    short = [s for s in segments if s.stop - s.start <= _LONG_SEGMENT]
    long = tuple(s for s in segments if s.stop - s.start > _LONG_SEGMENT)
    # A stack read for one or two adapters out of many would cost more than their own products.
    if len(short) * 2 < num_slots:
        return LoraRows(segments=tuple(segments), single=tuple(segments))
    return LoraRows(segments=tuple(segments), stacked=_stack(short, num_slots), single=long)


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, rows: LoraRows) -> None:
    """y[i] += weight(i) * x[i] @ a[slot(i)] @ b[slot(i)]; rows without an adapter are untouched."""
    if rows.stacked is not None:
        _add_stacked(y, x, weights, rows.stacked)
    for segment in rows.single:
        _add_single(y, x, weights, segment)
    if rows.then is not None:
        add_lora(y, x, weights, rows.then)


def _add_stacked(y: Tensor, x: Tensor, weights: LoraWeights, rows: StackedRows) -> None:
    num_slots, num_rows, start = rows.num_slots, rows.rows_per_slot, rows.start
    stop = None if start is None else start + num_slots * num_rows
    picked = x.index_select(0, rows.gather) if start is None else x[start:stop]
    h = product(picked.view(num_slots, num_rows, -1), weights.a[:num_slots])
    if rows.weights is not None:
        h.mul_(rows.weights)
    for piece in weights.slices:
        rank, out_features = piece.b.shape[1:]
        out_stop = piece.out_start + out_features
        h_slice = h[:, :, piece.rank_start : piece.rank_start + rank]
        delta = product(h_slice, piece.b[:num_slots]).view(num_slots * num_rows, out_features)
        target = y[:, piece.out_start : out_stop]
        if start is not None:
            target[start:stop].add_(delta)
        else:
            target.index_add_(0, rows.rows, delta.index_select(0, rows.positions))


def _add_single(y: Tensor, x: Tensor, weights: LoraWeights, segment: Segment) -> None:
    h = product(x[segment.start : segment.stop], weights.a[segment.slot])
    if segment.weight != 1:
        h.mul_(segment.weight)
    for piece in weights.slices:
        rank, out_features = piece.b.shape[1:]
        h_slice = h[:, piece.rank_start : piece.rank_start + rank]
        target = y[segment.start : segment.stop, piece.out_start : piece.out_start + out_features]
        target.add_(product(h_slice, piece.b[segment.slot]))


def _is_one_run(segments: Sequence[Segment], num_slots: int) -> bool:
    """Slot 0's rows, then slot 1's, and so on, with nothing between."""
    if [segment.slot for segment in segments] != list(range(num_slots)):
        return False
    return all(a.stop == b.start for a, b in zip(segments, segments[1:], strict=False))


def _stack(segments: Sequence[Segment], num_slots: int) -> StackedRows:
    by_slot: list[list[tuple[int, float]]] = [[] for _ in range(num_slots)]
    for segment in segments:
        by_slot[segment.slot] += [
            (row, segment.weight) for row in range(segment.start, segment.stop)
        ]
    rows_per_slot = max(len(entries) for entries in by_slot)
    gather: list[int] = []
    weights: list[float] = []
    rows: list[int] = []
    positions: list[int] = []
    for slot, entries in enumerate(by_slot):
        positions += range(slot * rows_per_slot, slot * rows_per_slot + len(entries))
        rows += [row for row, _ in entries]
        padding = rows_per_slot - len(entries)
        # Rows of other slots may be NaN: padding repeats an own one.
        gather += [row for row, _ in entries] + [entries[0][0] if entries else 0] * padding
        weights += [weight for _, weight in entries] + [0.0] * padding
    is_run = rows == list(range(rows[0], rows[0] + num_slots * rows_per_slot))
    shape = (num_slots, rows_per_slot, 1)
    is_plain = all(segment.weight == 1 for segment in segments)
    return StackedRows(
        num_slots=num_slots,
        rows_per_slot=rows_per_slot,
        start=rows[0] if is_run else None,
        gather=torch.tensor(gather),
        rows=torch.tensor(rows),
        positions=torch.tensor(positions),
        weights=None if is_plain else torch.tensor(weights).view(shape),
    )
