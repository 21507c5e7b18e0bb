"""The descriptions of adapters that an engine has inspected or registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CheckLevel = Literal["header", "full"]
"""What a registration checks: config and header of the weights, or their values as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """A registered adapter: its CID, its folder, and its size and rank in the packed form.

    Its identity is the CID; the engine knows no names.
    """

    cid: str
    path: str
    rank: int
    num_bytes: int
    warnings: tuple[str, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    """An aLoRA acts from the last occurrence of these tokens in the prompt on."""
    only_alone: str = ""
    """Why it cannot be part of a sum, nor have a weight other than 1; empty: it can."""
    vocab_size: int = 0
    """Number of tokens that it reads if they are not those of the base; 0: those of the base."""
    tokenizer_digest: str = ""
    """Digest of its tokenizer files; empty: it has none, and the base's tokenizer is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedCard:
    """An adapter whose config and header were checked, and whose weights were not read yet.

    Its CID is not known, so that it cannot be selected before it is identified.
    """

    path: str
    rank: int
    num_bytes: int
    warnings: tuple[str, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    only_alone: str = ""
    vocab_size: int = 0

    def identified(
        self, cid: str, warnings: tuple[str, ...] = (), tokenizer_digest: str = ""
    ) -> AdapterCard:
        """Return the card of a registered adapter; `warnings` are those of its values."""
        return AdapterCard(
            cid=cid,
            path=self.path,
            rank=self.rank,
            num_bytes=self.num_bytes,
            warnings=(*self.warnings, *warnings),
            invocation_tokens=self.invocation_tokens,
            only_alone=self.only_alone,
            vocab_size=self.vocab_size,
            tokenizer_digest=tokenizer_digest,
        )


def vocab_size_of(cards: Sequence[AdapterCard], base_vocab_size: int) -> int:
    """Return the number of token ids that the adapters of a selection can read and write."""
    # An adapter that adds tokens is not part of sums.
    own = cards[0].vocab_size if len(cards) == 1 else 0
    return own or base_vocab_size
