"""The adapters that the texts of a request may name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from loramux.types.composition import parse_sum

_IN_PROMPT = re.compile(rb"<lora:([^:<>]{1,1000})")
# Servers refuse longer names.
_MAX_CHARACTERS = 16_384
# `base:adapter`, where the base may be `llama3:8b`.
_MAX_COLONS = 4


def names_in(texts: Iterable[str], body: bytes) -> frozenset[str]:
    """Return all adapters that these fields, or the prompt of an image, may name."""
    found = {part for text in texts for part in parts_of(text)}
    if b"<lora:" in body:
        found |= {name.decode("utf-8", "replace") for name in _IN_PROMPT.findall(body)}
    return frozenset(found)


def parts_of(text: str) -> set[str]:
    """Return the names that a text may mean: itself, the part after `base:`, terms of a sum."""
    if len(text) > _MAX_CHARACTERS:
        return set()
    starts = [0, *(at + 1 for at in islice(_colons(text), _MAX_COLONS))]
    found = set()
    for start in starts:
        found.add(text[start:])
        found |= {name for name, _ in parse_sum(text[start:]) or ()}
    return found


def _colons(text: str) -> Iterator[int]:
    at = text.find(":")
    while at >= 0:
        yield at
        at = text.find(":", at + 1)
