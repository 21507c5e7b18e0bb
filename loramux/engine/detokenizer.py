"""Decodes the tokens of one answer incrementally; text that may still change is held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from loramux.engine.codec import EngineCodec

CONTEXT_TOKENS = 8
MAX_CHARACTER_BYTES = 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes an output token by token, up to the first stop string.

    With a byte-level tokenizer, the concatenated results of push() and flush() equal
    decode of the whole output. Other tokenizers decode the output together with the end
    of the prompt, because their decoders drop a leading space.
    """

    def __init__(
        self,
        tokenizer: EngineCodec,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: stop strings are looked for in the text after so many tokens."""
        self._num_unstoppable = min_tokens
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._held = ""
        self._stream = self._open_stream(prompt_token_ids)
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Return the text that this token has made final."""
        if self._num_unstoppable > 0:
            self._num_unstoppable -= 1
            return "" if self._is_skipped(token_id) else self._stream.push(token_id)
        if self.stopped_by is not None or self._is_skipped(token_id):
            return ""
        return self._release(self._stream.push(token_id), is_last=False)

    def flush(self) -> str:
        """Return the text that was held back; call it after the last token."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._stream.flush(), is_last=True)

    def _open_stream(self, prompt_token_ids: Sequence[int]) -> _TextStream:
        if self._tokenizer.is_byte_level:
            return _ByteStream(self._tokenizer)
        context = [i for i in prompt_token_ids[-CONTEXT_TOKENS:] if not self._is_skipped(i)]
        return _WindowStream(self._tokenizer, context)

    def _is_skipped(self, token_id: int) -> bool:
        return self._tokenizer.is_skipped(token_id, skip_special_tokens=self._skip_special_tokens)

    def _release(self, text: str, *, is_last: bool) -> str:
        text = self._held + text
        found = _first_stop(text, self._stop)
        if found is not None:
            end, start, self.stopped_by = found
            self._held = ""
            return text[: end if self._include_stop else start]
        num_final = len(text) if is_last else _start_of_partial_stop(text, self._stop)
        self._held = text[num_final:]
        return text[:num_final]


class _TextStream(Protocol):
    """Decodes tokens incrementally, without stop strings."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Decodes the bytes of byte-level tokens as UTF-8."""

    def __init__(self, tokenizer: EngineCodec) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Decodes the last tokens with and without the newest one; the difference is its text."""

    def __init__(self, tokenizer: EngineCodec, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context
        self._shown = self._decode()
        self._num_pending = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_pending += 1
        text = self._decode()
        # Byte tokens of an incomplete character make the whole run of byte tokens invalid.
        is_final = text.startswith(self._shown) and not text.endswith(REPLACEMENT)
        if not is_final and self._num_pending < MAX_CHARACTER_BYTES:
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
        # Skipped tokens are never in the window.
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """Return (end, start, stop) of the stop string that ends first."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found) if found else None


def _start_of_partial_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return the start of the longest suffix that may become a stop string, or the length."""
    earliest = len(text)
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while 0 <= start < earliest:
            if stop.startswith(text[start:]):
                earliest = start
                break
            start = text.find(stop[0], start + 1)
    return earliest
