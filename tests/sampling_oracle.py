"""What transformers makes of sampling parameters, and what is fair to expect of draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from loramux.types.sampling import SamplingParams


def random_logits(rows: int, vocab: int, *, seed: int = 0, scale: float = 3) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def scaled_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    return (logits - logits.amax(dim=-1, keepdim=True)) / params.temperature


def kept_by_transformers(logits: Tensor, params: SamplingParams) -> set[int]:
    """Tokens that may be drawn; logits [vocab], no two of them equal."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    no_prompt: Any = torch.zeros(1, 0, dtype=torch.long)
    one_row: Any = logits.unsqueeze(0).clone()
    scores = warpers(no_prompt, one_row)
    return token_set(scores[0].isfinite())


def token_set(member: Tensor) -> set[int]:
    return set(member.nonzero().squeeze(1).tolist())


def chi_square(counts: Sequence[int], expected: Sequence[float]) -> float:
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
