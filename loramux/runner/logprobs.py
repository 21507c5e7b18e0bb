"""Log-probabilities of tokens by the raw logits, independent of sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.runner.batch import LogitsOf, vanished_rows
from loramux.runner.pooling import HiddenRows
from loramux.runner.row_uses import NOT_FINITE, RowUses
from loramux.types.request import TokenLogprob

ROWS_AT_ONCE = 64
"""Rows per pass: bounds the working memory to a few times that of their logits."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Describe one token per row, with the `top` most likely ones. logits [rows, vocab]"""
    if logits.shape[0] != len(token_ids):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(token_ids)} tokens")
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        found += _describe(logits[rows], token_ids[rows], top)
    return found


def score(
    uses: RowUses, states: HiddenRows, logits_of: LogitsOf, failed: dict[int, str]
) -> dict[int, list[TokenLogprob]]:
    """Describe the tokens that the scored rows ask for, by sequence.

    `failed` receives the sequences with a NaN or +inf among these logits, or a row of -inf alone.
    """
    result = {}
    for chunk, rows, following in uses.scored:
        hidden = states.of(rows)
        logits = logits_of(hidden, rows)
        is_valid = not vanished_rows(hidden)
        if not (is_valid and bool(logits.amax(dim=-1).isfinite().all())):
            failed[chunk.sequence_id] = NOT_FINITE
        result[chunk.sequence_id] = token_logprobs(logits, following.token_ids, following.top)
    return result


def _describe(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    total = logits.logsumexp(dim=-1)
    scores = logits.gather(1, chosen)
    logprobs = (scores.squeeze(1) - total).clamp_(max=0.0).tolist()
    ranks = ((logits > scores).sum(dim=-1) + 1).tolist()
    alternatives = _most_likely(logits, total, min(top, logits.shape[1]))
    return [
        TokenLogprob(token_id, logprob, rank, best)
        for token_id, logprob, rank, best in zip(
            token_ids, logprobs, ranks, alternatives, strict=True
        )
    ]


def _most_likely(logits: Tensor, total: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the `count` best tokens per row; ties go to the lowest id, unlike torch.topk."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(logits.shape[0])]
    if count:
        lowest = logits.topk(count, dim=-1).values[:, -1:]
        rows, token_ids = (logits >= lowest).nonzero(as_tuple=True)
        logprobs = (logits[rows, token_ids] - total[rows]).clamp_(max=0.0)
        for row, token_id, logprob in zip(
            rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True
        ):
            found[row].append((token_id, logprob))
    return [tuple(sorted(best, key=lambda pair: -pair[1])[:count]) for best in found]
