"""A cache of encoded prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from loramux.diffusion.families.base import Text
from loramux.types.request import Selection


class PromptKey(NamedTuple):
    text: str
    is_negative: bool
    weighs_words: bool
    length: int
    selection: Selection
    """The adapters of the request that change a text encoder, with their weights."""


class PromptCache:
    """Keeps the last used texts within a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._texts: OrderedDict[PromptKey, Text] = OrderedDict()
        self.used_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, key: PromptKey, encode: Callable[[], Text]) -> Text:
        """Return the encoded text; encode it if it is not kept."""
        found = self._texts.get(key)
        if found is not None:
            self.num_hits += 1
            self._texts.move_to_end(key)
            return found
        self.num_misses += 1
        text = encode()
        num_bytes = _num_bytes(text)
        if num_bytes <= self._budget_bytes:
            self._texts[key] = text
            self.used_bytes += num_bytes
            while self.used_bytes > self._budget_bytes:
                self.used_bytes -= _num_bytes(self._texts.popitem(last=False)[1])
        return text

    def forget(self, cid: str) -> None:
        """Drop the texts that were encoded with this adapter."""
        for key in [key for key in self._texts if any(cid == used for used, _ in key.selection)]:
            self.used_bytes -= _num_bytes(self._texts.pop(key))


def _num_bytes(text: Text) -> int:
    return sum(value.nbytes for value in text.values())
