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


class NextTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens that follow some rows, whose log-probabilities are asked for."""

    token_ids: Sequence[int]
    top: int
    """Number of alternatives to report for each."""


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of a chunk whose hidden states are read, and what for.

    A token is sampled after each row of a SampleRow, each row of NextTokens scores the token that
    follows it, and a Pooling sums its rows (MEAN) or reads the only one.
    """

    start: int
    """Index of the first row in the chunk."""
    count: int
    use: SampleRow | NextTokens | Pooling


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
    rows: tuple[Rows, ...] = ()
    """Disjoint and in order; each sampled row is one of its own, and they are the last."""
    num_sampled: int = 0
    """Number of sampled rows; 0 if the prompt continues in a later step."""

    @property
    def num_drafts(self) -> int:
        """The last tokens are so many drafts: each counts if the row before it samples it."""
        return self.num_sampled - 1 if self.num_sampled else 0

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    accepted: dict[int, list[int]]
    """sequence_id -> the tokens of its sampled rows, up to the first that differs from its draft:
    at most one more than the drafts of the chunk."""
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """sequence_id -> one entry for each row of NextTokens, then, if the request asks for them, one
    for each accepted token."""
    failed: dict[int, str] = field(default_factory=dict)
    """sequence_id -> why the sequence has no valid token, as a clause ("a logit is NaN"). It ends
    with an error, whatever the other fields have for it."""
    pooled: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    """sequence_id -> the hidden state of a row with pooling, or the sum of all (MEAN), or the
    outputs of the head."""


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
