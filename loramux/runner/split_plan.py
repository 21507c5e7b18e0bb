"""Splits a step into two smaller ones with the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loramux.types.step import UNKNOWN_TOKEN, Chunk, NextTokens, Rows, StepPlan, StepResult


def with_known(plan: StepPlan, token_ids: Mapping[int, Sequence[int]]) -> StepPlan:
    """Replace unknown tokens by the last step's tokens."""
    return StepPlan(
        tuple(
            chunk
            if chunk.token_ids[-1] != UNKNOWN_TOKEN
            else replace(chunk, token_ids=(*chunk.token_ids[:-1], token_ids[chunk.sequence_id][-1]))
            for chunk in plan.chunks
        )
    )


def without_drafts(plan: StepPlan) -> StepPlan:
    """Leave out the drafts, with the rows that are sampled after them."""
    return StepPlan(
        tuple(
            replace(
                chunk,
                token_ids=chunk.token_ids[: -chunk.num_drafts],
                rows=chunk.rows[: -chunk.num_drafts],
                num_sampled=1,
            )
            if chunk.num_drafts
            else chunk
            for chunk in plan.chunks
        )
    )


def halves(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Split the tokens in half; a chunk across the middle is cut in two. It has no drafts."""
    room = plan.num_tokens // 2
    first: list[Chunk] = []
    second: list[Chunk] = []
    for chunk in plan.chunks:
        size = len(chunk.token_ids)
        if size <= room:
            first.append(chunk)
        elif room == 0:
            second.append(chunk)
        else:
            before, after = _cut(chunk, room)
            first.append(before)
            second.append(after)
        room -= min(room, size)
    return StepPlan(tuple(first)), StepPlan(tuple(second))


def join(first: StepResult, second: StepResult) -> StepResult:
    """Merge the results of both halves."""
    logprobs = dict(first.logprobs)
    for sequence_id, found in second.logprobs.items():
        logprobs[sequence_id] = logprobs.get(sequence_id, []) + found
    pooled = dict(first.pooled)
    for sequence_id, vector in second.pooled.items():
        # Only a chunk whose hidden states are summed is in both halves.
        pooled[sequence_id] = pooled[sequence_id] + vector if sequence_id in pooled else vector
    return StepResult(
        {**first.accepted, **second.accepted},
        logprobs,
        {**first.failed, **second.failed},
        pooled,
    )


def _cut(chunk: Chunk, size: int) -> tuple[Chunk, Chunk]:
    before = [_part(rows, 0, size) for rows in chunk.rows]
    after = [_part(rows, size, len(chunk.token_ids)) for rows in chunk.rows]
    return (
        replace(
            chunk,
            token_ids=chunk.token_ids[:size],
            rows=tuple(rows for rows in before if rows.count),
            num_sampled=0,
        ),
        replace(
            chunk,
            token_ids=chunk.token_ids[size:],
            start=chunk.start + size,
            rows=tuple(rows for rows in after if rows.count),
        ),
    )


def _part(rows: Rows, start: int, stop: int) -> Rows:
    """Return the rows between these indices of the chunk, counted from the first index."""
    first, last = max(rows.start, start), min(rows.start + rows.count, stop)
    use = rows.use
    if isinstance(use, NextTokens):
        use = replace(use, token_ids=use.token_ids[first - rows.start : last - rows.start])
    return Rows(first - start, max(0, last - first), use)
