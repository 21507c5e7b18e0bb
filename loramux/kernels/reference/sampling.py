"""Reference: samples tokens for rows with a temperature and no other sampling parameter."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_tokens(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """One token per row: the argmax at temperature 0, else by inverse CDF in vocabulary order.

    logits [rows, vocab]   temperatures [rows] float32   noise [rows] float64 in [0, 1)
    returns [rows] int64. A row whose best logit is not finite takes it, whatever its temperature;
    ties go to the first; NaN counts as the highest.
    """
    logits = torch.where(logits.isnan(), torch.inf, logits.float())
    best = logits.max(dim=-1, keepdim=True)
    scaled = (logits - best.values) / temperatures.clamp(min=1e-30)[:, None]
    weights = scaled.exp().nan_to_num(nan=0.0)
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(cumulated, noise[:, None] * cumulated[:, -1:], right=True)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1, keepdim=True)
    draws = (temperatures > 0)[:, None] & best.values.isfinite()
    return torch.where(draws, place.minimum(last), best.indices).squeeze(1)
