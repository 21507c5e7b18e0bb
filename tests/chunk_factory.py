"""Chunks of steps, by what is read of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.types.request import Selection
from loramux.types.step import Chunk, NextTokens, Rows, SampleRow


def make_chunk(  # noqa: PLR0913
    sequence_id: int,
    token_ids: Sequence[int],
    start: int,
    page_ids: Sequence[int],
    selection: Selection = (),
    sample: SampleRow | None = None,
    *,
    following: Sequence[int] = (),
    top: int = 0,
) -> Chunk:
    """Make a chunk; `sample` is what follows its last token, `following` are scored tokens."""
    rows = []
    if following:
        rows.append(Rows(0, len(following), NextTokens(following, top)))
    if sample is not None:
        rows.append(Rows(len(token_ids) - 1, 1, sample))
    num_sampled = int(sample is not None)
    return Chunk(sequence_id, token_ids, start, page_ids, selection, tuple(rows), num_sampled)
