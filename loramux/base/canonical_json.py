"""Encodes values as canonical JSON (RFC 8785), so that equal values have equal digests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal

MAX_EXACT_INTEGER = 2**53


def canonical_json(value: object) -> bytes:
    """Return UTF-8. Raises ValueError for NaN, integers over 2^53 and unpaired surrogates."""
    return write(value).encode("utf-8")


def write(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return write_text(value)
    if isinstance(value, int | float):
        return write_number(value)
    if isinstance(value, Mapping):
        return write_object(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return f"[{','.join(map(write, value))}]"
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_object(value: Mapping[object, object]) -> str:
    names = [name for name in value if isinstance(name, str)]
    if len(names) != len(value):
        raise TypeError("names in a JSON object are strings")
    names.sort(key=utf16)
    return "{" + ",".join(f"{write_text(name)}:{write(value[name])}" for name in names) + "}"


def utf16(text: str) -> bytes:
    return text.encode("utf-16-be")


def write_text(text: str) -> str:
    # json escapes exactly what the RFC requires: quote, backslash and characters below U+0020.
    return json.dumps(text, ensure_ascii=False)


def write_number(value: float) -> str:
    """Format a number like ECMAScript: shortest digits, exponents from 1e21 and below 1e-6."""
    if not math.isfinite(value):
        raise ValueError(f"{value} has no JSON form")
    if isinstance(value, int):
        if abs(value) > MAX_EXACT_INTEGER:
            raise ValueError("an integer over 2^53 is not exact in JSON")
        return str(value)
    if value == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    text = "".join(map(str, digits))
    assert isinstance(exponent, int)
    return "-" * sign + place_point(text, len(text) + exponent)


def place_point(digits: str, point: int) -> str:
    """Insert the decimal point after the first `point` digits; it may lie outside the digits."""
    if len(digits) <= point <= 21:
        return digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    mantissa = digits if len(digits) == 1 else f"{digits[0]}.{digits[1:]}"
    return f"{mantissa}e{point - 1:+d}"
