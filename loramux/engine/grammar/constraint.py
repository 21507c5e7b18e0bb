"""What one sequence may generate next: by its grammar, and by the tokens its request names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loramux.engine.grammar.distinct_keys import DistinctKeys
from loramux.engine.grammar.library import WORD_BITS
from loramux.types.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_EMPTY = (
    "No token may follow: the grammar, min_tokens, bad_words and allowed_token_ids of the request "
    "leave none. Ask for less."
)


class Constraint:
    """The state of one sequence; preemption keeps it."""

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Iterable[int],
        matcher: LLMatcher | None,
        *,
        vocab_size: int,
        own_eos_ids: tuple[int, ...] = (),
        distinct_keys: DistinctKeys | None = None,
    ) -> None:
        """`stop_token_ids`: those that end the answer, the model's own included.

        `own_eos_ids`: tokens that end an adapter's answer, and that the grammar does not know.
        """
        self.matcher = matcher
        self.vocab_size = vocab_size
        self._own_eos_ids = own_eos_ids
        self._distinct_keys = distinct_keys
        self.allowed: NDArray[np.int32] | None = None
        self.error: str | None = None
        self._stop_token_ids = tuple(stop_token_ids)
        self._min_tokens = params.min_tokens
        self._bad_runs = params.bad_words_token_ids
        self._allowed_token_ids = params.allowed_token_ids

    @property
    def is_complete(self) -> bool:
        return self.matcher is not None and self.matcher.is_stopped()

    def restricts(self, num_outputs: int) -> bool:
        return (
            self.matcher is not None
            or num_outputs < self._min_tokens
            or self._allowed_token_ids is not None
            or bool(self._bad_runs)
        )

    def accept(self, token_id: int) -> None:
        matcher = self.matcher
        if matcher is None or self.error is not None or matcher.is_stopped():
            return
        if token_id in self._own_eos_ids and matcher.is_accepting():
            return
        if self._distinct_keys is not None:
            self._distinct_keys.accept(token_id, matcher)
        if not matcher.consume_token(token_id):
            self.error = f"The grammar failed: {matcher.get_error()}"

    def restrict(self, words: NDArray[np.int32], output_token_ids: Sequence[int]) -> None:
        """Clear the tokens that the request does not allow in the mask of its grammar.

        words [words], which sampling reads until the next step
        """
        if self.matcher is not None and self.matcher.is_error():
            self.error = f"The grammar failed: {self.matcher.get_error()}"
        elif self.matcher is not None:
            if self._distinct_keys is not None:
                self._distinct_keys.restrict(words, self.matcher)
            if self._own_eos_ids and self.matcher.is_accepting():
                words |= _mask_of(self._own_eos_ids, words.shape[0])
        if self._allowed_token_ids is not None:
            words &= _mask_of(self._allowed_token_ids, words.shape[0])
        if len(output_token_ids) < self._min_tokens:
            _clear(words, self._stop_token_ids)
        for run in self._bad_runs:
            start = len(output_token_ids) - len(run) + 1
            if start >= 0 and tuple(output_token_ids[start:]) == run[:-1]:
                _clear(words, run[-1:])
        if self.error is None and not words.any():
            self.error = _EMPTY
        # A row without tokens cannot be sampled: what it generates is dropped with the request.
        self.allowed = None if self.error is not None else words


def full_mask(vocab_size: int) -> NDArray[np.int32]:
    """Return a mask that allows every token."""
    return np.full(-(-vocab_size // WORD_BITS), -1, dtype=np.int32)


def _mask_of(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    mask = np.zeros(num_words, dtype=np.int32)
    for token_id in token_ids:
        mask.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
    return mask


def _clear(words: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
