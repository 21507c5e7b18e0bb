"""Splits a step into two smaller ones with the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loramux.types.pooling import Pooling
from loramux.types.step import UNKNOWN_TOKEN, Chunk, StepPlan, StepResult


def with_known(plan: StepPlan, token_ids: Mapping[int, Sequence[int]]) -> StepPlan:
    """Replace unknown tokens by the last step's tokens."""
    return StepPlan(
        tuple(
            chunk
            if chunk.token_ids[-1] != UNKNOWN_TOKEN
            else replace(chunk, token_ids=(*chunk.token_ids[:-1], token_ids[chunk.sequence_id][-1]))
            for chunk in plan.chunks
        ),
        plan.has_pooling,
    )


def halves(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Split the tokens in half; a chunk across the middle is cut in two."""
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
    has_pooling = plan.has_pooling
    return StepPlan(tuple(first), has_pooling), StepPlan(tuple(second), has_pooling)


def join(first: StepResult, second: StepResult) -> StepResult:
    """Merge the results of both halves."""
    prompt_logprobs = dict(first.prompt_logprobs)
    for sequence_id, found in second.prompt_logprobs.items():
        prompt_logprobs[sequence_id] = prompt_logprobs.get(sequence_id, []) + found
    pooled = dict(first.pooled)
    for sequence_id, vector in second.pooled.items():
        # Only a chunk whose hidden states are summed is in both halves.
        pooled[sequence_id] = pooled[sequence_id] + vector if sequence_id in pooled else vector
    return StepResult(
        {**first.token_ids, **second.token_ids},
        {**first.logprobs, **second.logprobs},
        prompt_logprobs,
        {**first.failed, **second.failed},
        pooled,
    )


def _cut(chunk: Chunk, size: int) -> tuple[Chunk, Chunk]:
    following = chunk.next_prompt_token_ids
    before = replace(
        chunk,
        token_ids=chunk.token_ids[:size],
        sample=None,
        next_prompt_token_ids=following[:size],
        pooling=Pooling.MEAN if chunk.pooling is Pooling.MEAN else None,
    )
    after = replace(
        chunk,
        token_ids=chunk.token_ids[size:],
        start=chunk.start + size,
        next_prompt_token_ids=following[size:],
    )
    return before, after
