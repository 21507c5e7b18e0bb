"""Removes the tokens that would repeat a key of a JSON object, which a grammar cannot count.

A key is compared as it is spelled. A spelling is unique because the grammars write each character
in one way, but for the escapes of four hexadecimal digits, which are removed as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loramux.engine.grammar.json_keys import JsonKeys
from loramux.engine.grammar.library import WORD_BITS
from loramux.engine.grammar.token_texts import TokenTexts

if TYPE_CHECKING:
    from llguidance import LLMatcher

_IN_OBJECT = (b'"', b"}")
# A brace in free text may be followed by these, one that opens an object may not.
_NOT_IN_OBJECT = (b"{", b"x", b"0")
_WHITESPACE = b" \t\r\n"
_MAX_KEYS = 32
"""Keys of an object up to which the search for one that is left takes less than a step."""


class DistinctKeys:
    """The keys of the open objects of one sequence."""

    def __init__(self, texts: TokenTexts, *, is_whole: bool, may_run_out: bool) -> None:
        """`is_whole`: the answer is one JSON value and nothing else.

        `may_run_out`: the keys of some object may be finitely many.
        """
        self._texts = texts
        self._may_run_out = may_run_out
        self._json = JsonKeys(is_whole=is_whole)

    def accept(self, token_id: int, matcher: LLMatcher) -> None:
        """Advance by a token, which the matcher consumes afterwards."""
        text = self._texts.texts[token_id] if token_id < len(self._texts.texts) else b""
        self._json.feed(text, lambda end: self._begins_object(matcher, text[: end + 1]))

    def restrict(self, words: NDArray[np.int32], matcher: LLMatcher) -> None:
        """Clear the tokens that repeat a key, or from which only repeated keys follow.

        words [words]. A mask of which nothing would be left stays: the schema leaves no other key.
        """
        removed = self._repeating(words)
        if self._may_run_out:
            removed += self._exhausted(words, matcher)
        if not removed:
            return
        before = words.copy()
        _clear(words, np.concatenate(removed))
        if not words.any():
            words[:] = before

    def _repeating(self, words: NDArray[np.int32]) -> list[NDArray[np.int64]]:
        """Return the tokens that complete a repeated key, or spell one in a second way."""
        json, texts = self._json, self._texts
        if not json.is_in_object:
            return [texts.repeating] if len(texts.repeating) else []
        is_between = json.place == "between" or json.is_escaped
        suspects = _allowed(words, texts.keys if is_between else texts.keys_after_string)
        removed = [np.array([token for token in suspects if self._repeats(token)], dtype=np.int64)]
        if json.place == "key":
            removed.append(texts.after_backslash if json.is_escaped else texts.with_code_escape)
            removed += [texts.starting_with(rest + b'"') for rest in self._rivals()]
        return [tokens for tokens in removed if len(tokens)]

    def _repeats(self, token_id: int) -> bool:
        json = self._json.copy()
        json.feed(self._texts.texts[token_id])
        return json.has_repeated or json.has_code_escape

    def _rivals(self) -> list[bytes]:
        """Return what the known keys still need after what is written of the next one."""
        begun = bytes(self._json.key)
        return [key[len(begun) :] for key in self._json.keys if key.startswith(begun)]

    def _exhausted(self, words: NDArray[np.int32], matcher: LLMatcher) -> list[NDArray[np.int64]]:
        """Return the tokens after which every key that the grammar allows is a repeated one.

        Tokens that hold such a comma or quote beside other text are left out: the same text is
        possible in more tokens.
        """
        json, texts = self._json, self._texts.texts
        if len(json.keys) > _MAX_KEYS:
            return []
        removed: list[int] = []
        if json.expects_key:
            removed += [
                token
                for token in _allowed(words, np.arange(len(texts)))
                if texts[token].strip(_WHITESPACE) not in (b"", b'"')
            ]
        elif json.place == "key":
            removed += self._dead_ends(words, matcher, [rest + b'"' for rest in self._rivals()])
        is_between = json.place == "between"
        with_comma = self._texts.with_comma if is_between else self._texts.with_comma_after_quote
        for token in _allowed(words, with_comma):
            after = json.copy()
            after.feed(texts[token])
            if after.num_commas and not (
                texts[token].strip(_WHITESPACE) == b","
                and self._has_another(matcher, token, after.keys)
            ):
                removed.append(token)
        return [np.array(removed, dtype=np.int64)] if removed else []

    def _has_another(self, matcher: LLMatcher, comma: int, keys: set[bytes]) -> bool:
        """Whether a new key may follow a token that ends with a comma."""
        after = _after(matcher, comma)
        quote = self._texts.spell(b'"')
        if quote is None or after.validate_tokens(quote) == 0:
            return True
        return self._has_fresh(_after(after, *quote), [key + b'"' for key in keys])

    def _has_fresh(self, matcher: LLMatcher, repeated: list[bytes]) -> bool:
        """Whether any text may follow that is none of the repeated ones."""
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32).copy()
        closing = [self._texts.starting_with(rest) for rest in repeated]
        _clear(words, np.concatenate([self._texts.with_code_escape, *closing]))
        num_allowed = int(np.unpackbits(words.view(np.uint8)).sum())
        if num_allowed > sum(map(len, repeated)):
            return True
        inner = self._inner(words, repeated)
        return num_allowed > len(inner) or any(
            self._has_fresh(_after(matcher, token), self._narrowed(repeated, token))
            for token in inner
        )

    def _dead_ends(
        self, words: NDArray[np.int32], matcher: LLMatcher, repeated: list[bytes]
    ) -> list[int]:
        return [
            token
            for token in self._inner(words, repeated)
            if not self._has_fresh(_after(matcher, token), self._narrowed(repeated, token))
        ]

    def _inner(self, words: NDArray[np.int32], repeated: list[bytes]) -> list[int]:
        """Return the allowed tokens that are the beginning of one of some texts, but not all."""
        beginnings = {text[:end] for text in repeated for end in range(1, len(text))}
        return [
            token for text in beginnings for token in _allowed(words, self._texts.equal_to(text))
        ]

    def _narrowed(self, repeated: list[bytes], token: int) -> list[bytes]:
        text = self._texts.texts[token]
        return [rest[len(text) :] for rest in repeated if rest.startswith(text)]

    def _begins_object(self, matcher: LLMatcher, text: bytes) -> bool:
        """Whether the grammar takes the last byte of a text, a brace, as the start of an object."""
        spelled = self._texts.spell(text)
        if spelled is None:
            return True  # The scanner finds out by what follows.
        if matcher.validate_tokens(spelled) < len(spelled):
            return False

        def may_follow(byte: bytes) -> bool:
            token = self._texts.spell(byte)
            return token is not None and matcher.validate_tokens([*spelled, *token]) > len(spelled)

        return any(map(may_follow, _IN_OBJECT)) and not any(map(may_follow, _NOT_IN_OBJECT))


def _after(matcher: LLMatcher, *tokens: int) -> LLMatcher:
    after = matcher.deep_copy()
    after.consume_tokens(list(tokens))
    return after


def _allowed(words: NDArray[np.int32], tokens: NDArray[np.int64]) -> list[int]:
    known = tokens[tokens < words.shape[0] * WORD_BITS]
    bits = words.view(np.uint32)[known // WORD_BITS] >> (known % WORD_BITS).astype(np.uint32)
    found: list[int] = known[(bits & 1).astype(bool)].tolist()
    return found


def _clear(words: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    known = tokens[tokens < words.shape[0] * WORD_BITS]
    bits = np.uint32(1) << (known % WORD_BITS).astype(np.uint32)
    np.bitwise_and.at(words.view(np.uint32), known // WORD_BITS, ~bits)
