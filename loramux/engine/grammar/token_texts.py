"""The bytes of all tokens, sorted, and the tokens that may complete a key of an object."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loramux.engine.grammar.json_keys import JsonKeys

# From the inside of a string, a key is complete at the third quote, otherwise at the second.
_KEY_AFTER_STRING = re.compile(rb'".*".*("|\\u)', re.DOTALL)
_KEY = re.compile(rb'".*("|\\u)', re.DOTALL)
_CODE_ESCAPE = re.compile(rb'\A(?:[^"\\]|\\[^u])*\\u', re.DOTALL)


class TokenTexts:
    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts`: the bytes of each token; none for special tokens."""
        self.texts = texts
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in order]
        self._ids = np.array(order, dtype=np.int64)
        self.keys_after_string = self._matching(_KEY_AFTER_STRING)
        self.keys = self._matching(_KEY)
        self.repeating = np.array(
            [token for token in self.keys.tolist() if _repeats(texts[token])], dtype=np.int64
        )
        self.with_comma = self._matching(re.compile(rb","))
        self.with_comma_after_quote = self._matching(re.compile(rb'".*,', re.DOTALL))
        self.with_code_escape = self._matching(_CODE_ESCAPE)
        self.after_backslash = self.starting_with(b"u")

    def starting_with(self, prefix: bytes) -> NDArray[np.int64]:
        """Return the tokens that begin with some bytes, the last of which is ASCII."""
        first = bisect_left(self._sorted, prefix)
        last = bisect_left(self._sorted, prefix[:-1] + bytes([prefix[-1] + 1]))
        return self._ids[first:last]

    def equal_to(self, text: bytes) -> NDArray[np.int64]:
        first = bisect_left(self._sorted, text)
        return self._ids[first : bisect_left(self._sorted, text + b"\0")]

    def spell(self, text: bytes) -> list[int] | None:
        """Return a token for each byte; None where a byte has none."""
        tokens = [self.equal_to(bytes([byte])) for byte in text]
        return [int(found[0]) for found in tokens] if all(map(len, tokens)) else None

    def _matching(self, pattern: re.Pattern[bytes]) -> NDArray[np.int64]:
        found = [token for token, text in enumerate(self.texts) if pattern.search(text)]
        return np.array(found, dtype=np.int64)


def _repeats(text: bytes) -> bool:
    """Whether objects that begin in a token repeat a key, or spell one in a second way, in it."""
    json = JsonKeys(is_whole=True)
    json.feed(text)
    return json.has_repeated or json.has_code_escape
