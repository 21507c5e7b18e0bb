"""The keys of the open objects of a JSON text that grows by a few bytes at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Place = Literal["outside", "between", "key", "string"]
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
_LETTER_U = ord("u")
_WHITESPACE = b" \t\r\n"


class JsonKeys:
    """A scanner that follows objects and their keys, as they are spelled."""

    def __init__(self, *, is_whole: bool) -> None:
        """`is_whole`: the text is one JSON value; otherwise objects stand within other text."""
        self._is_whole = is_whole
        # The keys of an object; None: an array.
        self._frames: list[set[bytes] | None] = []
        self._awaits_key = False
        self.is_escaped = False
        """Whether the last byte was the backslash of an escape."""
        self.place: Place = "between" if is_whole else "outside"
        self.key = bytearray()
        """The key that is being written, without its quotes."""
        self.num_commas = 0
        """The commas between two members of an object."""
        self.has_repeated = False
        self.has_code_escape = False
        """Whether a key has an escape of four hexadecimal digits: a second spelling of its text."""

    @property
    def keys(self) -> set[bytes]:
        """The keys of the innermost object; empty in an array."""
        return (self._frames[-1] if self._frames else None) or set()

    @property
    def is_in_object(self) -> bool:
        return any(frame is not None for frame in self._frames)

    @property
    def expects_key(self) -> bool:
        """Whether the next key of an object that has some comes next."""
        return self.place == "between" and self._awaits_key and bool(self.keys)

    def copy(self) -> JsonKeys:
        """Return a scanner at the same place, which has found nothing yet."""
        other = JsonKeys(is_whole=self._is_whole)
        other._frames = [None if frame is None else set(frame) for frame in self._frames]
        other._awaits_key = self._awaits_key
        other.is_escaped = self.is_escaped
        other.place = self.place
        other.key = bytearray(self.key)
        return other

    def feed(self, text: bytes, begins_object: Callable[[int], bool] | None = None) -> None:
        """Advance by some bytes; `begins_object`: whether a brace outside of JSON opens one."""
        for position, byte in enumerate(text):
            if self.place == "outside":
                if byte == _OPEN_OBJECT and (begins_object is None or begins_object(position)):
                    self._structure(byte)
            elif self.place == "between":
                self._structure(byte)
            elif self.is_escaped:
                self.is_escaped = False
                self._in_string(byte)
                self.has_code_escape |= byte == _LETTER_U and self.place == "key"
            elif byte == _QUOTE:
                self._end_string()
            else:
                self.is_escaped = byte == _BACKSLASH
                self._in_string(byte)

    def _in_string(self, byte: int) -> None:
        if self.place == "key":
            self.key.append(byte)

    def _end_string(self) -> None:
        if self.place == "key":
            key, keys = bytes(self.key), self._frames[-1]
            assert keys is not None
            self.has_repeated |= key in keys
            keys.add(key)
            self.key.clear()
            self._awaits_key = False
        self.place = "between"

    def _structure(self, byte: int) -> None:
        if byte == _QUOTE:
            self.place = "key" if self._awaits_key else "string"
        elif byte in (_OPEN_OBJECT, _OPEN_ARRAY):
            self._frames.append(set() if byte == _OPEN_OBJECT else None)
            self._awaits_key = byte == _OPEN_OBJECT
            self.place = "between"
        elif byte in (_CLOSE_OBJECT, _CLOSE_ARRAY):
            if self._frames:
                self._frames.pop()
            self._awaits_key = False
            if not self._frames and not self._is_whole:
                self.place = "outside"
        elif byte == _COMMA:
            self._awaits_key = bool(self._frames) and self._frames[-1] is not None
            self.num_commas += self._awaits_key
        elif self._awaits_key and byte not in _WHITESPACE and not self._is_whole:
            # No JSON after all.
            self._frames.clear()
            self._awaits_key = False
            self.place = "outside"
