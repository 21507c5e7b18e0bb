"""Reads tool calls from the text of an answer while it is generated."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

from loramux.server.chat.tools.families import TEXT_BEGIN, Family

# Whole escapes alone, and the first half of a pair with its second.
_STRING_PART = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u])|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The name of a call is complete."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the last call, which are JSON."""

    index: int
    text: str


Piece = Text | CallBegin | Arguments


class CallParser:
    """Splits an answer into text and calls; it holds back what may begin a call."""

    def __init__(self, family: Family, *, is_raw: bool = False) -> None:
        """`is_raw`: text that the family wraps is any JSON value, and is not decoded."""
        self._family = family
        self._is_raw = is_raw
        self._held = ""
        self._read = self._read_start
        self._value = JsonEnd()
        self._has_quote = False
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Return what this text makes certain."""
        self._held += text
        return self._drain()

    def flush(self) -> list[Piece]:
        """Return what was held back: the answer has ended."""
        pieces = self._drain()
        if self._held and self._read in (self._read_start, self._read_text):
            pieces.append(Text(self._held))
        self._held = ""
        return pieces

    def _drain(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held:
            before = (len(self._held), self._read)
            pieces += self._read()
            if before == (len(self._held), self._read):
                break
        return pieces

    def _read_start(self) -> list[Piece]:
        """Decide what the answer is, for a family whose text does not precede calls."""
        family = self._family
        if family.text_precedes:
            self._read = self._read_text
            return []
        if self._held.startswith(family.begin):
            self._take(len(family.begin))
            self._read = self._read_name
        elif family.wraps_text and self._held.startswith(TEXT_BEGIN):
            self._take(len(TEXT_BEGIN))
            self._read = self._read_wrapped
        elif not _may_become(self._held, (family.begin, TEXT_BEGIN)):
            self._read = self._read_rest
        return []

    def _read_text(self) -> list[Piece]:
        begin = self._family.begin
        found = self._held.find(begin)
        if found >= 0:
            text = self._take(found)
            self._take(len(begin))
            self._read = self._read_name
        else:
            text = self._take(start_of_partial(self._held, begin))
        return [Text(text)] if text else []

    def _read_rest(self) -> list[Piece]:
        return [Text(self._take(len(self._held)))]

    def _read_name(self) -> list[Piece]:
        found = self._held.find(self._family.before_arguments)
        if found < 0:
            return []
        name = self._take(found)
        self._take(len(self._family.before_arguments))
        self._value = JsonEnd()
        self._read = self._read_arguments
        self.num_calls += 1
        return [CallBegin(self.num_calls - 1, f"call_{secrets.token_hex(12)}", name)]

    def _read_arguments(self) -> list[Piece]:
        size = self._value.push(self._held)
        text = self._take(len(self._held) if size is None else size)
        if size is not None:
            self._read = self._read_after
        return [Arguments(self.num_calls - 1, text)] if text else []

    def _read_after(self) -> list[Piece]:
        family = self._family
        following = family.after_call + family.separator + family.before_name
        if self._held.startswith(following):
            self._take(len(following))
            self._read = self._read_name
        return []

    def _read_wrapped(self) -> list[Piece]:
        """Read a JSON value, decoded if it is the string that stands for the text."""
        if self._is_raw:
            size = self._value.push(self._held)
            text = self._take(len(self._held) if size is None else size)
            self._read = self._read_wrapped if size is None else self._read_nothing
            return [Text(text)] if text else []
        self._held = self._held if self._has_quote else self._held[1:]
        self._has_quote = True
        found = _STRING_PART.match(self._held)
        assert found is not None
        text = self._take(found.end())
        if self._held.startswith('"'):
            self._read = self._read_nothing
        return [Text(_decoded(text))] if text else []

    def _read_nothing(self) -> list[Piece]:
        self._held = ""
        return []

    def _take(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text


class JsonEnd:
    """Finds the end of a JSON value in pieces of text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False

    def push(self, text: str) -> int | None:
        """Return where the value ends in this text; None if it goes on."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    if self._depth == 0:
                        return position + 1
            elif self._step(character):
                return position + (1 if self._depth == 0 and character in "]}" else 0)
        return None

    def _step(self, character: str) -> bool:
        """Advance outside of a string; return whether the value has ended."""
        if character == '"':
            self._in_string = self._has_begun = True
        elif character in "{[":
            self._depth += 1
            self._has_begun = True
        elif character in "}]" and self._depth > 0:
            self._depth -= 1
            return self._depth == 0
        elif self._depth == 0 and self._has_begun and character in " \t\r\n,}]":
            # A number or a word ends with what follows it.
            self._depth = -1
            return True
        elif not character.isspace():
            self._has_begun = True
        return False


def _may_become(text: str, wholes: tuple[str, ...]) -> bool:
    return any(whole.startswith(text) for whole in wholes)


def start_of_partial(text: str, whole: str) -> int:
    """Return where the longest end of text begins that may become `whole`."""
    for size in range(min(len(text), len(whole) - 1), 0, -1):
        if whole.startswith(text[-size:]):
            return len(text) - size
    return len(text)


def _decoded(text: str) -> str:
    """Return the characters of a part of a JSON string; half a pair becomes U+FFFD."""
    units = json.loads(f'"{text}"', strict=False).encode("utf-16", "surrogatepass")
    return str(units.decode("utf-16", "replace"))
