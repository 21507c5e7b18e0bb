"""Drafts: tokens that may follow a decoding sequence, verified by the step that computes them."""

from __future__ import annotations

from typing import Protocol

from loramux.scheduler.sequence import Sequence


class DraftSource(Protocol):
    """Guesses the next tokens of sequences; a wrong guess costs time and changes no output."""

    def awaits(self, sequence: Sequence) -> bool:
        """Returns whether it may have drafts once the token in flight is known."""
        ...

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Returns at most `limit` tokens to follow the newest one, which is known."""
        ...

    def verified(self, sequence: Sequence, *, num_drafts: int, num_accepted: int) -> None:
        """Takes note of how many drafts of a step the model has sampled too."""
        ...
