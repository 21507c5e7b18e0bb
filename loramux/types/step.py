"""`StepPlan` and `StepResult`: the only link between the scheduler and the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from loramux.types.pooling import Pooling
from loramux.types.request import Selection, TokenLogprob
from loramux.types.sampling import SamplingParams


class TokenConstraint(Protocol):
    """Which tokens one sequence may generate next; it advances with the tokens of the answer."""

    @property
    def allowed(self) -> NDArray[np.int32] | None:
        """A bit per token, 32 in a word, that the engine sets before each step; None: all tokens.

        Tokens after the last word are not allowed.
        """
        ...

    @property
    def error(self) -> str | None:
        """Why the request cannot go on."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether no token may follow."""
        ...

    def restricts(self, num_outputs: int) -> bool:
        """Whether it leaves out tokens after so many of the answer."""
        ...

    def accept(self, token_id: int) -> None:
        """Advances by a token of the answer."""
        ...


# Every step makes hundreds of chunks. A struct is made ten times as fast as a frozen dataclass,
# and none of these is ever part of a cycle.
class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """Parameters, seed and history from which the token after a chunk is sampled."""

    params: SamplingParams
    seed: int
    """Seed of this choice; the noise of a step is a function of it and the output length."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    constraint: TokenConstraint | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether the next token depends on a constraint."""
        constraint = self.constraint
        return constraint is not None and constraint.restricts(len(self.output_token_ids))


UNKNOWN_TOKEN = -1
"""Placeholder for a token that an in-flight step is going to sample."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The tokens that one sequence adds to a step."""

    sequence_id: int
    token_ids: Sequence[int]
    """The last may be UNKNOWN_TOKEN: the in-flight step is going to sample it."""
    start: int
    """Position of the first token."""
    page_ids: Sequence[int]
    """KV pages of the sequence in order, including those that this chunk writes."""
    selection: Selection
    sample: SampleRow | None
    """None if the prompt continues in a later step."""
    prompt_logprobs: int | None = None
    next_prompt_token_ids: Sequence[int] = ()
    """With prompt_logprobs: the prompt token after each token of the chunk, if there is one."""
    pooling: Pooling | None = None
    """Pools hidden states of this chunk: of all its tokens (MEAN), or of its last one."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]
    has_pooling: bool = False
    """Whether any chunk has."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    token_ids: dict[int, list[int]]
    """sequence_id -> new tokens, for each chunk with a sample row. Only a step that is done when
    `launch` returns may give more than one: the next plan must know their number."""
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """sequence_id -> one entry for each of its tokens, if the request asked for logprobs."""
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    """sequence_id -> why the sequence has no valid token, as a clause ("a logit is NaN"). It ends
    with an error, whatever the other fields have for it."""
    pooled: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    """sequence_id -> the hidden state that a chunk with pooling asks for, or the sum of all (MEAN),
    or the outputs of the head."""


BeforeChoice = Callable[[], None]
"""Sets what the choice of the step's tokens needs: the masks of constrained rows."""


class InFlightStep(Protocol):
    """A launched step whose tokens may still be on the device."""

    @property
    def is_done(self) -> bool:
        """Whether the result is on the host; if so, it is applied before the next plan."""
        ...

    def result(self) -> StepResult:
        """Wait for the device and return the result; repeated calls return the same one."""
        ...
