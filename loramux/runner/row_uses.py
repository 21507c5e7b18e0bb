"""Which rows of a step are read, and what for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from loramux.types.pooling import Pooling
from loramux.types.request import Selection, TokenLogprob
from loramux.types.step import Chunk, NextTokens, SampleRow, StepResult

NOT_FINITE = "its logits or hidden states overflow"
"""Why a sequence has no token; the reason in `StepResult.failed`."""


@dataclass(frozen=True, slots=True)
class RowUses:
    """The rows of a step that are read, by use and in row order."""

    sampled: list[int]
    samples: list[SampleRow]
    """One for each sampled row."""
    owners: list[Chunk]
    """The chunk of each sampled row."""
    scored: list[tuple[Chunk, range, NextTokens]]
    pooled: list[tuple[Chunk, range, Pooling]]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Self:
        """Return the number the rows of these chunks, one chunk behind the other."""
        start = 0
        sampled: list[int] = []
        samples: list[SampleRow] = []
        owners: list[Chunk] = []
        uses = cls(sampled, samples, owners, [], [])
        for chunk in chunks:
            for rows in chunk.rows:
                use = rows.use
                # Nearly all rows of nearly all steps.
                if type(use) is SampleRow:
                    sampled.append(start + rows.start)
                    samples.append(use)
                    owners.append(chunk)
                    continue
                some = range(start + rows.start, start + rows.start + rows.count)
                if isinstance(use, NextTokens):
                    uses.scored.append((chunk, some, use))
                elif isinstance(use, Pooling):
                    uses.pooled.append((chunk, some, use))
            start += len(chunk.token_ids)
        return uses

    @property
    def is_sampled_only(self) -> bool:
        return not self.scored and not self.pooled

    @property
    def rows(self) -> list[int]:
        """All rows that are read, ascending."""
        others = chain.from_iterable(rows for _, rows, _ in chain(self.scored, self.pooled))
        return sorted(chain(self.sampled, others))

    @property
    def selections(self) -> list[Selection]:
        """Those of the sampled rows."""
        return [chunk.selection for chunk in self.owners]

    @property
    def sequence_ids(self) -> list[int]:
        """The sequences with sampled rows."""
        return list(dict.fromkeys(chunk.sequence_id for chunk in self.owners))

    @property
    def drafts(self) -> dict[int, Sequence[int]]:
        """sequence_id -> drafts, each of which follows a sampled row."""
        return {chunk.sequence_id: chunk.drafts for chunk in self.owners if chunk.num_drafts}


def accept(
    sequence_ids: Sequence[int],
    drafts: Mapping[int, Sequence[int]],
    token_ids: Sequence[int],
    *,
    broken: Collection[int] = (),
    logprobs: Sequence[TokenLogprob | None] = (),
) -> StepResult:
    """Return the result of sampled rows: each sequence has one, and one after each of its drafts.

    What was sampled after a rejected draft has no meaning. `broken`: rows without a valid token.
    """
    result, start = StepResult({}), 0
    for sequence_id in sequence_ids:
        guessed = drafts.get(sequence_id, ())
        count = 1
        for sampled, draft in zip(token_ids[start:], guessed, strict=False):
            if sampled != draft:
                break
            count += 1
        rows = range(start, start + count)
        result.accepted[sequence_id] = list(token_ids[rows.start : rows.stop])
        found = [logprob for logprob in logprobs[rows.start : rows.stop] if logprob is not None]
        if found:
            result.logprobs[sequence_id] = found
        if any(row in broken for row in rows):
            result.failed[sequence_id] = NOT_FINITE
        start += 1 + len(guessed)
    return result
