"""Drafts: tokens that may follow a decoding sequence, verified by the step that computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from loramux.scheduler.sequence import Sequence


class DraftSource(Protocol):
    """Guesses the next tokens of sequences; a wrong guess costs time and changes no output."""

    @property
    def max_rows(self) -> int:
        """Return how many rows a step with drafts may sample; more take longer than they save."""
        ...

    @property
    def num_drafts(self) -> Mapping[str, int]:
        """Return the verified drafts by the CID of a request's first adapter, "" for the base."""
        ...

    @property
    def num_accepted(self) -> Mapping[str, int]:
        """Return how many of them were accepted."""
        ...

    def awaits(self, sequence: Sequence) -> bool:
        """Return whether it may have drafts once the token in flight is known."""
        ...

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return at most `limit` tokens to follow the newest one, which is known."""
        ...

    def verified(self, sequence: Sequence, *, num_drafts: int, num_accepted: int) -> None:
        """Take note of how many drafts of a step the model has sampled too."""
        ...
