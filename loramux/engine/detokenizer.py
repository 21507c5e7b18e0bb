"""Tokens of one answer to text, as they come; what may still change is held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from loramux.engine.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
MAX_BYTES_OF_A_CHARACTER = 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """All that push() and flush() return is the text of the output, up to a stop string.

    For byte-level tokenizers it is what Tokenizer.decode gives for the whole output. Others see the
    end of the prompt too, since their decoders drop the space at the start of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._held = ""
        self._stream = self._open_stream(prompt_token_ids)
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        if self.stopped_by is not None or self._is_silent(token_id):
            return ""
        return self._release(self._stream.push(token_id), is_last=False)

    def flush(self) -> str:
        """What was held back, when no token will follow."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._stream.flush(), is_last=True)

    def _open_stream(self, prompt_token_ids: Sequence[int]) -> _TextStream:
        if self._tokenizer.is_byte_level:
            return _ByteStream(self._tokenizer)
        context = [i for i in prompt_token_ids[-CONTEXT_TOKENS:] if not self._is_silent(i)]
        return _WindowStream(self._tokenizer, context)

    def _is_silent(self, token_id: int) -> bool:
        return self._tokenizer.is_silent(token_id, skip_special_tokens=self._skip_special_tokens)

    def _release(self, text: str, *, is_last: bool) -> str:
        text = self._held + text
        found = _first_to_end(text, self._stop)
        if found is not None:
            end, start, self.stopped_by = found
            self._held = ""
            return text[: end if self._include_stop else start]
        certain = len(text) if is_last else _start_of_open_stop(text, self._stop)
        self._held = text[certain:]
        return text[:certain]


class _TextStream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Decodes the last few tokens with and without the newest; the difference is its text."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context
        self._shown = self._decode()
        self._num_pending = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_pending += 1
        text = self._decode()
        # Byte tokens of an unfinished character spoil the whole run of byte tokens before them.
        is_certain = text.startswith(self._shown) and not text.endswith(REPLACEMENT)
        if not is_certain and self._num_pending < MAX_BYTES_OF_A_CHARACTER:
            return ""
        added = text[len(self._shown) :]
        self._window = self._window[-self._num_pending :]
        self._shown = self._decode()
        self._num_pending = 0
        return added

    def flush(self) -> str:
        text = self._decode()
        added, self._shown, self._num_pending = text[len(self._shown) :], text, 0
        return added

    def _decode(self) -> str:
        # Silent tokens never get here, so that there is nothing to skip.
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _first_to_end(text: str, stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the stop string that is complete first, reading on."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found) if found else None


def _start_of_open_stop(text: str, stops: tuple[str, ...]) -> int:
    """Where the longest end of the text begins that may become a stop string; else its length."""
    earliest = len(text)
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while 0 <= start < earliest:
            if stop.startswith(text[start:]):
                earliest = start
                break
            start = text.find(stop[0], start + 1)
    return earliest
