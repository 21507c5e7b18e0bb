"""What an engine needs of a tokenizer beside what its server does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loramux.backend.text import TextCodec


class EngineCodec(TextCodec, Protocol):
    """The tokenizer of the base, or of an adapter."""

    @property
    def is_byte_level(self) -> bool:
        """Whether the text is the UTF-8 decoding of the tokens' concatenated bytes."""
        ...

    def is_skipped(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether decode() leaves the token out."""
        ...

    def shares_vocabulary(self, other: object) -> bool:
        """Whether the other tokenizer gives the same ids to every text."""
        ...

    def eos_ids_with(self, base_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the end-of-sequence ids of the base, then those that only this one has."""
        ...
