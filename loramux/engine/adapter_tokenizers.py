"""The tokenizers of adapters that have tokenizer files of their own.

The files are read once for all adapters with the same ones, in a process with limits, and so are
the texts of their requests. An adapter whose files say what those of the base say costs nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from loramux.adapters.peft.refusals import RefusalCode
from loramux.engine.adapter_text.processes import AdapterProcesses, Source
from loramux.engine.adapter_text.tokenizer import AdapterTokenizer
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import AdapterRefused
from loramux.types.adapter import AdapterCard

MAX_KEPT = 32
"""Tokenizers that are kept; each has at most a megabyte of templates and added tokens."""
MAX_VERDICTS = 1024
"""Files that were refused, or that are the base's, of which that is kept."""
_LASTING = frozenset(
    {
        RefusalCode.BROKEN_TOKENIZER,
        RefusalCode.FOREIGN_TOKENIZER,
        RefusalCode.TOKENIZER_TOO_LARGE,
    }
)


class AdapterTokenizers:
    """Finds the tokenizer of an adapter; any thread may call it."""

    def __init__(
        self,
        base: Tokenizer,
        base_folder: Path,
        *,
        vocab_size: int,
        chat_template: str | None = None,
    ) -> None:
        """`vocab_size`: rows of the base's embedding; `chat_template`: replaces the folder's."""
        self._base = base
        self._vocab_size = vocab_size
        self._processes = AdapterProcesses(base_folder, chat_template)
        self._kept: OrderedDict[Source, AdapterTokenizer] = OrderedDict()
        # None: the files are the base's.
        self._verdicts: OrderedDict[Source, AdapterRefused | None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, cards: Sequence[AdapterCard]) -> Tokenizer | AdapterTokenizer | None:
        """Return the tokenizer of a selection if nothing has to be read for it, else None.

        Raises AdapterRefused if the files were refused before.
        """
        card = _deciding(cards)
        return self._base if card is None else self._find(self._source(card))

    def read(self, cards: Sequence[AdapterCard]) -> Tokenizer | AdapterTokenizer:
        """Return the tokenizer of a selection; read it before its first use.

        That of an adapter is used if it is alone, or if all adapters of a sum have the same files.
        Raises AdapterRefused.
        """
        card = _deciding(cards)
        if card is None:
            return self._base
        source = self._source(card)
        found = self._find(source)
        return self._read(source) if found is None else found

    def close(self) -> None:
        """End the processes; they start again if they are needed."""
        self._processes.close()

    def _read(self, source: Source) -> Tokenizer | AdapterTokenizer:
        try:
            description = self._processes.read(source)
        except AdapterRefused as error:
            if error.code in _LASTING:
                self._decide(source, error)
            raise
        if description.is_base:
            self._decide(source, None)
            return self._base
        ask = partial(self._processes.ask, source, description)
        made = AdapterTokenizer(self._base, description, ask)
        with self._lock:
            # Another thread may have read the same files meanwhile.
            made = self._kept.setdefault(source, made)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _source(self, card: AdapterCard) -> Source:
        return Source(card.tokenizer_digest, card.vocab_size or self._vocab_size, card.path)

    def _find(self, source: Source) -> Tokenizer | AdapterTokenizer | None:
        with self._lock:
            if source in self._verdicts:
                self._verdicts.move_to_end(source)
                refused = self._verdicts[source]
                if refused is None:
                    return self._base
                raise AdapterRefused(refused.code, refused.reason, fix=refused.fix)
            found = self._kept.get(source)
            if found is not None:
                self._kept.move_to_end(source)
        return found

    def _decide(self, source: Source, verdict: AdapterRefused | None) -> None:
        with self._lock:
            self._verdicts[source] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)


def _deciding(cards: Sequence[AdapterCard]) -> AdapterCard | None:
    """Return an adapter whose tokenizer files answer the selection; None: those of the base."""
    digests = {card.tokenizer_digest for card in cards}
    return cards[0] if len(digests) == 1 and "" not in digests else None
