"""Digests of token ids, by which a receipt binds the prompt and the answer.

The bytes are the ids as little-endian unsigned integers of 32 bits, one after another.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

PREFIX = "sha256:"


class TokenDigest:
    """Digest of ids that arrive in parts."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._hash = hashlib.sha256()
        self.add(token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        self._hash.update(struct.pack(f"<{len(token_ids)}I", *token_ids))

    @property
    def text(self) -> str:
        return PREFIX + self._hash.hexdigest()


def token_digest(token_ids: Sequence[int]) -> str:
    return TokenDigest(token_ids).text


def token_digests(sequences: Iterable[Sequence[int]]) -> tuple[str, ...]:
    return tuple(map(token_digest, sequences))
