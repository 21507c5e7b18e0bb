"""Samples among a row's most likely tokens, when its filters leave no others.

Ties at the edge of the kept set are resolved by the lowest id, so that the set depends on the row
alone; torch.topk would keep arbitrary ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.types.sampling import SamplingParams


def draw_among_best(
    logits: Tensor,
    params: Sequence[SamplingParams],
    noise: Tensor,
    total: Tensor | None,
    count: int,
) -> Tensor:
    """Sample one token per row; -1 where the `count` best do not suffice or are NaN.

    logits [rows, vocab]; noise [rows, 1]; total [rows, 1]: sum of exp((logits - max) / temperature)
    over the vocabulary, for rows with top_p and no top_k
    """
    values, token_ids = logits.topk(min(count, logits.shape[1]), dim=-1)
    scaled = (values - values[:, :1]) / temperatures(params, logits)
    kept = kept_prefix(scaled, params, total)
    _take_lowest_ids(logits, values, token_ids, kept)
    outside = torch.arange(values.shape[1], device=logits.device) >= kept
    weights = scaled.double().exp_().masked_fill_(outside, 0.0)
    token_ids, order = token_ids.masked_fill_(outside, logits.shape[1]).sort(dim=-1)
    place = inverse_cdf(weights.gather(1, order), noise)
    enough = (kept < values.shape[1]) | (values.shape[1] == logits.shape[1])
    known = enough & values[:, :1].isfinite()
    return torch.where(known, token_ids.gather(1, place), -1).squeeze(1)


def temperatures(params: Sequence[SamplingParams], like: Tensor) -> Tensor:
    # Smaller temperatures are zero in float32; here only the best token has weight.
    return like.new_tensor([max(p.temperature, 1e-30) for p in params]).unsqueeze(1)


def kept_prefix(scaled: Tensor, params: Sequence[SamplingParams], total: Tensor | None) -> Tensor:
    """Count the sorted candidates kept by top_k, top_p and min_p in this order; at least 1.

    scaled [rows, candidates], highest first; without `total`, top_p is of what top_k leaves
    """
    places = torch.arange(scaled.shape[1], device=scaled.device)
    limit = torch.tensor([p.top_k if p.top_k > 0 else scaled.shape[1] for p in params])
    inside = places < limit.to(scaled.device).unsqueeze(1)
    mass = scaled.double().exp_().masked_fill_(~inside, 0.0)
    if total is None:
        total = mass.sum(dim=-1, keepdim=True)
    share = column([p.top_p if p.top_p < 1 else math.inf for p in params], scaled)
    before = mass.cumsum(dim=-1) - mass
    kept = inside & (before < share * total) & (scaled >= lowest_scaled(params, scaled))
    return kept.sum(dim=-1, keepdim=True).clamp_(min=1)


def lowest_scaled(params: Sequence[SamplingParams], like: Tensor) -> Tensor:
    """Convert min_p, which is relative to the best token, to a bound on scaled logits."""
    lowest = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    return like.new_tensor(lowest).unsqueeze(1)


def inverse_cdf(weights: Tensor, noise: Tensor) -> Tensor:
    """Return the first index at which the cumulative weights exceed noise times their sum.

    weights [rows, places]; noise [rows, 1] in [0, 1)
    """
    # In float64, so that rounding does not bias the draw.
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(cumulated, noise * cumulated[:, -1:], right=True)
    place.clamp_(max=weights.shape[1] - 1)
    allowed = weights.gather(1, place) > 0
    if not bool(allowed.all()):
        # A parallel scan may increase by a rounding error at a weight of 0.
        place = torch.where(allowed, place, weights.argmax(dim=-1, keepdim=True))
    return place


def column(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device).unsqueeze(1)


def _take_lowest_ids(logits: Tensor, values: Tensor, token_ids: Tensor, kept: Tensor) -> None:
    following = values.gather(1, kept.clamp(max=values.shape[1] - 1))
    lowest = values.gather(1, kept - 1)
    tied = ((kept < values.shape[1]) & (following == lowest)).squeeze(1)
    for row in tied.nonzero().squeeze(1).tolist():
        stop = int(kept[row])
        start = int((values[row] > lowest[row]).sum())
        equal = (logits[row] == lowest[row]).nonzero().squeeze(1)
        token_ids[row, start:stop] = equal[: stop - start]
