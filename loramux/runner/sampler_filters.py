"""Filters over the whole vocabulary, for rows whose kept set may be large.

Ties at the cutoff are resolved by the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loramux.runner.sampler_candidates import column, kept_prefix, lowest_scaled
from loramux.types.sampling import SamplingParams

NUM_BUCKETS = 2048
BUCKET_SPAN = 24.0
"""In nats below the best token; lower logits share the last bucket."""


class Cut(NamedTuple):
    """Cutoff per row [rows, 1]: drops tokens below `lowest`, and all but `ties` equal to it."""

    lowest: Tensor
    ties: Tensor
    has_surplus: Tensor
    """Whether more than `ties` tokens are equal to `lowest`."""


def drop_filtered(weights: Tensor, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """weights[r, v] = 0 where row r's filters leave token v out; top_p is of what top_k leaves.

    weights, scaled [rows, vocab]; weights = exp(scaled); the best token of a row has scaled = 0
    """
    lowest = lowest_scaled(params, scaled)
    ranked = [i for i, p in enumerate(params) if 0 < p.top_k < scaled.shape[1]]
    massed = [i for i, p in enumerate(params) if p.top_p < 1 and i not in ranked]
    for members, find_cut in ((ranked, _cut_by_rank), (massed, _cut_by_mass)):
        if members:
            rows = torch.tensor(members, device=scaled.device)
            own = [params[i] for i in members]
            cut = find_cut(_select(weights, rows), _select(scaled, rows), own)
            lowest[rows] = torch.maximum(lowest[rows], cut.lowest)
            _drop_surplus_ties(weights, scaled, rows, cut)
    weights.masked_fill_(scaled < lowest, 0.0)


def _select(matrix: Tensor, rows: Tensor) -> Tensor:
    return matrix if rows.shape[0] == matrix.shape[0] else matrix[rows]


def _drop_surplus_ties(weights: Tensor, scaled: Tensor, rows: Tensor, cut: Cut) -> None:
    tied = cut.has_surplus.squeeze(1).nonzero().squeeze(1)
    if tied.shape[0]:
        equal = scaled[rows[tied]] == cut.lowest[tied]
        surplus = equal & (equal.cumsum(dim=-1) > cut.ties[tied])
        weights[rows[tied]] = weights[rows[tied]].masked_fill_(surplus, 0.0)


def _cut_by_rank(weights: Tensor, scaled: Tensor, params: Sequence[SamplingParams]) -> Cut:
    values = scaled.sort(dim=-1, descending=True).values
    return _cut_after(values, kept_prefix(values, params, None))


def _cut_by_mass(weights: Tensor, scaled: Tensor, params: Sequence[SamplingParams]) -> Cut:
    """Find the bucket in which top_p is reached by a histogram, and sort that bucket alone."""
    depth = (-scaled.amin(dim=-1, keepdim=True)).clamp_(1e-6, BUCKET_SPAN)
    # The infinite depth of a token with zero probability is clamped like any other.
    bucket = (scaled * (-(NUM_BUCKETS - 1) / depth)).clamp_(max=NUM_BUCKETS - 1).long()
    mass = torch.zeros(scaled.shape[0], NUM_BUCKETS, dtype=torch.float64, device=scaled.device)
    mass.scatter_add_(1, bucket, weights.double())
    reached = mass.cumsum(dim=-1)
    target = column([p.top_p for p in params], scaled) * reached[:, -1:]
    edge = (reached < target).sum(dim=-1, keepdim=True)
    values, size = _sorted_members(scaled, bucket == edge)
    inside = values.double().exp_()
    before = (reached - mass).gather(1, edge) + inside.cumsum(dim=-1) - inside
    kept = (before < target).sum(dim=-1, keepdim=True).minimum(size).clamp_(min=1)
    return _cut_after(values, kept)


def _sorted_members(scaled: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's members, highest first and padded with -inf, and their number."""
    rows, token_ids = member.nonzero(as_tuple=True)
    size = torch.bincount(rows, minlength=scaled.shape[0])
    first = size.cumsum(0) - size
    place = torch.arange(rows.shape[0], device=scaled.device) - first[rows]
    values = scaled.new_full((scaled.shape[0], int(size.max())), -math.inf)
    values[rows, place] = scaled[rows, token_ids]
    return values.sort(dim=-1, descending=True).values, size.unsqueeze(1)


def _cut_after(values: Tensor, kept: Tensor) -> Cut:
    """values [rows, candidates], highest first; kept [rows, 1], at least 1"""
    lowest = values.gather(1, kept - 1)
    ties = kept - (values > lowest).sum(dim=-1, keepdim=True)
    following = values.gather(1, kept.clamp(max=values.shape[1] - 1))
    return Cut(lowest, ties, (kept < values.shape[1]) & (following == lowest))
