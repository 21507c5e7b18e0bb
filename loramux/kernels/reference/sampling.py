"""Reference: samples tokens for rows with a temperature and no other sampling parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from loramux.kernels.sampling_ops import MaskedRows

NO_TOKEN = 1 << 32
"""Mark of a row without a valid token: the upper of two int32 words, the token is the lower one."""


def choose_tokens(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """One token per row: the argmax at temperature 0, else by inverse CDF in vocabulary order.

    logits [rows, vocab]   temperatures [rows] float32   noise [rows] float64 in [0, 1)
    returns [rows] int64. A row whose best logit is not finite takes it, whatever its temperature,
    plus NO_TOKEN; ties go to the first; NaN counts as the highest.
    """
    logits = torch.where(logits.isnan(), torch.inf, logits.float())
    best = logits.max(dim=-1, keepdim=True)
    scaled = (logits - best.values) / temperatures.clamp(min=1e-30)[:, None]
    weights = scaled.exp().nan_to_num(nan=0.0)
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(cumulated, noise[:, None] * cumulated[:, -1:], right=True)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1, keepdim=True)
    is_valid = best.values.isfinite()
    draws = (temperatures > 0)[:, None] & is_valid
    tokens = torch.where(draws, place.minimum(last), best.indices)
    return torch.where(is_valid, tokens, tokens + NO_TOKEN).squeeze(1)


def choose_masked_tokens(
    logits: Tensor, temperatures: Tensor, noise: Tensor, masked: MaskedRows
) -> Tensor:
    """`choose_tokens` of some rows, as if the logits of other tokens were -inf: [masked] int64"""
    rows, vocab = masked.rows.long(), logits.shape[1]
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    is_allowed = (masked.masks[:, :, None] >> bits & 1).flatten(1)[:, :vocab].bool()
    own = logits.new_full((len(rows), vocab), -torch.inf)
    width = is_allowed.shape[1]
    own[:, :width] = logits[rows, :width].masked_fill(~is_allowed, -torch.inf)
    return choose_tokens(own, temperatures[rows], noise[rows])
