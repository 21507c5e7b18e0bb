"""Drafts by prompt lookup: what followed the newest tokens when they occurred before.

Summaries, edits of code and repairs of JSON repeat long runs of their prompt. A lookup costs
microseconds and needs no model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from loramux.config.speculative import SpeculativeConfig
from loramux.scheduler.sequence import Sequence

# Earlier occurrences of the newest tokens that are compared; the longest match is taken.
_MAX_CANDIDATES = 8
# Drafts of a sequence's first step with drafts.
_FIRST_DRAFTS = 4
# Adapters with counters of their own; the others count with the base.
_MAX_COUNTED = 256
# After so many steps in a row without an accepted draft, a sequence pauses for that many tokens,
# and twice as long after each further one.
_MAX_MISSES, _FIRST_PAUSE, _MAX_PAUSE = 2, 8, 256


@dataclass(slots=True)
class History:
    """The tokens of one sequence by their n-grams, and how well its drafts did."""

    size: int
    """Tokens of an n-gram."""
    token_ids: list[int] = field(default_factory=list)
    num_drafts: int = _FIRST_DRAFTS
    """Drafts of the next step."""
    num_misses: int = 0
    pause: int = _FIRST_PAUSE
    resumes_at: int = 0
    """Number of tokens from which on there are drafts."""
    # n-gram -> the position after its last occurrence, and that position -> the one before it.
    _latest: dict[tuple[int, ...], int] = field(default_factory=dict)
    _before: dict[int, int] = field(default_factory=dict)

    def extend(self, sequence: Sequence) -> None:
        """Add the tokens of the sequence that are new and known."""
        known, size = self.token_ids, self.size
        start = len(known)
        known += sequence.tokens(start, sequence.num_tokens - sequence.has_unknown)
        # The last n-gram has no token after it yet.
        for position in range(max(size, start), len(known)):
            gram = tuple(known[position - size : position])
            earlier = self._latest.get(gram)
            if earlier is not None:
                self._before[position] = earlier
            self._latest[gram] = position

    def find(self, longest: int) -> int | None:
        """Return where the newest tokens occurred before: the position after them."""
        known = self.token_ids
        if len(known) <= self.size:
            return None
        position = self._latest.get(tuple(known[-self.size :]))
        best, best_length = None, 0
        for _ in range(_MAX_CANDIDATES):
            if position is None:
                break
            length = self._match(position, longest)
            if length > best_length:
                best, best_length = position, length
            position = self._before.get(position)
        return best

    def _match(self, position: int, longest: int) -> int:
        """Return how many tokens before the position equal the newest ones."""
        known, length = self.token_ids, self.size
        while (
            length < min(longest, position) and known[position - length - 1] == known[-length - 1]
        ):
            length += 1
        return length

    def following(self, position: int, count: int) -> list[int]:
        """Return the tokens from a position on; a run up to the newest token repeats."""
        known = self.token_ids
        found = known[position : position + count]
        period = len(known) - position
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class PromptLookup:
    """A DraftSource that looks up the newest tokens in the prompt and the answer so far."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.num_drafts: Counter[str] = Counter()
        self.num_accepted: Counter[str] = Counter()

    @property
    def max_rows(self) -> int:
        return self._config.max_rows

    def awaits(self, sequence: Sequence) -> bool:
        history = self._history(sequence)
        return history is not None and history.find(self._config.prompt_lookup_max) is not None

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        history = self._history(sequence)
        position = None if history is None else history.find(self._config.prompt_lookup_max)
        if history is None or position is None:
            return []
        return history.following(position, min(limit, history.num_drafts))

    def verified(self, sequence: Sequence, *, num_drafts: int, num_accepted: int) -> None:
        history = sequence.draft_state
        assert isinstance(history, History)
        cid = sequence.cids[0] if sequence.cids else ""
        if cid not in self.num_drafts and len(self.num_drafts) >= _MAX_COUNTED:
            cid = ""
        self.num_drafts[cid] += num_drafts
        self.num_accepted[cid] += num_accepted
        most = self._most(sequence)
        if num_accepted:
            grown = 2 * num_drafts if num_accepted == num_drafts else num_accepted + 1
            history.num_drafts = min(most, grown)
            history.num_misses, history.pause = 0, _FIRST_PAUSE
            return
        history.num_drafts = max(1, num_drafts // 2)
        history.num_misses += 1
        if history.num_misses >= _MAX_MISSES:
            history.resumes_at = len(history.token_ids) + history.pause
            history.pause = min(_MAX_PAUSE, 2 * history.pause)

    def _history(self, sequence: Sequence) -> History | None:
        """Return the history of a sequence that may have drafts now, up to its newest token."""
        most = self._most(sequence)
        if not most:
            return None
        history = sequence.draft_state
        if not isinstance(history, History):
            history = sequence.draft_state = History(self._config.prompt_lookup_min)
            history.num_drafts = min(most, _FIRST_DRAFTS)
        if sequence.num_tokens < history.resumes_at:
            return None
        history.extend(sequence)
        return history

    def _most(self, sequence: Sequence) -> int:
        own = sequence.request.params.num_speculative_tokens
        most = self._config.num_speculative_tokens
        return most if own is None else min(own, most)
