"""Reference of LoRA over stacked adapters: one segment after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from loramux.kernels.linear import product
from loramux.kernels.ops import LoraRows, LoraWeights, Segment

READS_ADDRESSES = False


def cut_rows(segments: Sequence[Segment], num_slots: int) -> LoraRows:
    """Keep the segments as they are."""
    return LoraRows(segments=tuple(segments))


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, rows: LoraRows) -> None:
    """y[i] += weight(i) * x[i] @ a[slot(i)] @ b[slot(i)]; rows without an adapter are untouched."""
    for segment in rows.segments:
        part = slice(segment.start, segment.stop)
        h = product(x[part], weights.a[segment.slot])
        for piece in weights.slices:
            rank, out_features = piece.b.shape[1:]
            h_slice = h[:, piece.rank_start : piece.rank_start + rank]
            delta = product(h_slice, piece.b[segment.slot])
            y[part, piece.out_start : piece.out_start + out_features] += segment.weight * delta
