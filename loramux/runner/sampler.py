"""Samples tokens from logits; a row's token does not depend on the other rows.

A draw uses one uniform number, a pure function of the row's seed and output length, and inverts
the CDF in vocabulary order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loramux.runner.logprobs import ROWS_AT_ONCE, token_logprobs
from loramux.runner.masks import gather_masks
from loramux.runner.penalties import adjust_logits, changes_logits
from loramux.runner.sampler_candidates import column, draw_among_best, inverse_cdf, temperatures
from loramux.runner.sampler_filters import drop_filtered
from loramux.types.request import TokenLogprob
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow

MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MAX_CANDIDATES = 1024
"""Above this top_k the vocabulary is sorted: torch.topk would not be faster."""
NUCLEUS_CANDIDATES = 256
"""Enough for the top_p of nearly every row of a trained model; other rows use all tokens."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    broken: list[int] = field(default_factory=list)
    """Rows without a valid token: a logit is NaN or +inf, or all are -inf."""


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> SampleOutput:
    """Sample one token per row; logits [rows, vocab] float32 are not modified."""
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
    token_ids = [0] * len(rows)
    for choose, members in _by_method(rows).items():
        at_once = len(members) if choose is _take_best else ROWS_AT_ONCE
        for start in range(0, len(members), at_once):
            some = members[start : start + at_once]
            chosen = choose(_own_logits(logits, rows, some), [rows[i] for i in some])
            for i, token_id in zip(some, chosen.tolist(), strict=True):
                token_ids[i] = token_id
    return SampleOutput(
        token_ids, _logprobs(logits, rows, token_ids), _broken_rows(logits, token_ids)
    )


def uniform(seed: int, step: int) -> float:
    """Return a number in [0, 1) with 53 random bits."""
    mixed = _mix((_mix(seed & MASK_64) + (step + 1) * GOLDEN_GAMMA) & MASK_64)
    return (mixed >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """Mix the bits of a value (finalizer of SplitMix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


Choose = Callable[[Tensor, Sequence[SampleRow]], Tensor]


def _by_method(rows: Sequence[SampleRow]) -> dict[Choose, list[int]]:
    members: dict[Choose, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(_method(row.params), []).append(i)
    return members


def _method(params: SamplingParams) -> Choose:
    if params.is_greedy:
        return _take_best
    if 0 < params.top_k < MAX_CANDIDATES:
        return _draw_ranked
    if params.top_k > 0:
        return _draw_filtered
    if params.top_p < 1:
        return _draw_nucleus
    return _draw_filtered if params.min_p > 0 else _draw


def _own_logits(logits: Tensor, rows: Sequence[SampleRow], members: Sequence[int]) -> Tensor:
    """Return the members' logits with penalties and masks, without a copy where possible."""
    adjusted = [place for place, i in enumerate(members) if changes_logits(rows[i].params)]
    masks = gather_masks([rows[i] for i in members], logits)
    if len(members) < len(rows):
        own = logits[torch.tensor(members, device=logits.device)]
    else:
        own = logits.clone() if adjusted or masks is not None else logits
    for place in adjusted:
        adjust_logits(own[place], rows[members[place]])
    if masks is not None:
        masks.apply(own)
    return own


def _take_best(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    # Three times as fast as argmax on a CPU; both return the first maximum.
    return logits.max(dim=-1).indices


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    weights = _scale(logits, rows).exp_()
    return inverse_cdf(weights, _noise(rows, weights)).squeeze(1)


def _draw_filtered(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    scaled = _scale(logits, rows)
    weights = scaled.exp()
    drop_filtered(weights, scaled, _params(rows))
    return inverse_cdf(weights, _noise(rows, weights)).squeeze(1)


def _draw_ranked(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    count = 1 + max(row.params.top_k for row in rows)
    drawn = draw_among_best(logits, _params(rows), _noise(rows, logits), None, count)
    return _draw_the_rest(logits, rows, drawn)


def _draw_nucleus(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    total = _scale(logits, rows).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    noise = _noise(rows, logits)
    drawn = draw_among_best(logits, _params(rows), noise, total, NUCLEUS_CANDIDATES)
    return _draw_the_rest(logits, rows, drawn)


def _draw_the_rest(logits: Tensor, rows: Sequence[SampleRow], drawn: Tensor) -> Tensor:
    rest = (drawn < 0).nonzero().squeeze(1)
    if rest.shape[0]:
        drawn[rest] = _draw_filtered(logits[rest], [rows[i] for i in rest.tolist()])
    return drawn


def _scale(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Compute (logits - max) / temperature."""
    best = logits.max(dim=-1, keepdim=True)
    scaled = logits - best.values
    scaled.div_(temperatures(_params(rows), logits))
    broken = (~best.values.isfinite()).squeeze(1).nonzero().squeeze(1)
    if broken.shape[0]:
        # Of NaN or infinite logits the greedy token is taken, by which the row is found broken.
        scaled[broken] = -torch.inf
        scaled[broken, best.indices[broken].squeeze(1)] = 0.0
    return scaled


def _broken_rows(logits: Tensor, token_ids: Sequence[int]) -> list[int]:
    """Return the rows whose token has a logit that is not finite: every method finds those."""
    if not token_ids:
        return []
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    is_broken = ~logits.gather(1, chosen).squeeze(1).isfinite()
    found: list[int] = is_broken.nonzero().squeeze(1).tolist()
    return found


def _noise(rows: Sequence[SampleRow], like: Tensor) -> Tensor:
    return column([uniform(row.seed, len(row.output_token_ids)) for row in rows], like)


def _params(rows: Sequence[SampleRow]) -> list[SamplingParams]:
    return [row.params for row in rows]


def _logprobs(
    logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> list[TokenLogprob | None]:
    found: list[TokenLogprob | None] = [None] * len(rows)
    for top in {row.params.logprobs for row in rows if row.params.logprobs is not None}:
        members = [i for i, row in enumerate(rows) if row.params.logprobs == top]
        own = logits[torch.tensor(members, device=logits.device)]
        described = token_logprobs(own, [token_ids[i] for i in members], top)
        for i, logprob in zip(members, described, strict=True):
            found[i] = logprob
    return found
