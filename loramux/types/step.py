"""`StepPlan` and `StepResult`: the only link between the scheduler and the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from loramux.types.request import Selection, TokenLogprob
from loramux.types.sampling import SamplingParams


# Every step makes hundreds of chunks. A struct is made ten times as fast as a frozen dataclass,
# and none of these is ever part of a cycle.
class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """How to choose the token that follows a chunk."""

    params: SamplingParams
    seed: int
    """Already mixed with the choice index; the step's noise is a function of it and num_output."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


UNKNOWN_TOKEN = -1
"""The place of a token that a step still on the device will give."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The rows that one sequence adds to a step."""

    sequence_id: int
    token_ids: Sequence[int]
    """The last may be unknown: it is what the step before this one samples for the sequence."""
    start: int
    """Position of the first token."""
    page_ids: Sequence[int]
    """KV pages of the whole sequence so far, in order, this chunk's tokens included."""
    selection: Selection
    sample: SampleRow | None
    """None: the prompt goes on in a later step."""
    prompt_logprobs: int | None = None
    next_prompt_token_ids: Sequence[int] = ()
    """With prompt_logprobs: the token that follows each row (one fewer at the prompt's end)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    token_ids: dict[int, int]
    """sequence_id -> sampled token, for each chunk that had a sample row."""
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
