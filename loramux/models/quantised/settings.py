"""Typed access to quantization_config, whose values come from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from loramux.errors import UnsupportedModel
from loramux.types.quantisation import Rule, WeightFormat

Settings = Mapping[str, Any]
ALTERNATIVE = "Use the unquantised checkpoint, or one in FP8, int8, AWQ, GPTQ or nf4."


def unsupported(what: str, fix: str = ALTERNATIVE) -> UnsupportedModel:
    """Return the error for a format that is not read; the text names what and the alternative."""
    return UnsupportedModel(f"The weights are quantised as {what}, which is not supported. {fix}")


def malformed(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"quantization_config in config.json is not valid: {what}.")


def mapping(value: object, name: str) -> Settings:
    if not isinstance(value, Mapping):
        raise malformed(f"{name} is not an object")
    return value


def strings(value: object, name: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise malformed(f"{name} is not a list of names")
    return value


def integer(settings: Settings, *names: str) -> int:
    """Return the number under the first of the names that is set."""
    for name in names:
        value = settings.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise malformed(f"{name} is {value!r}, not a whole number")
            return value
    raise malformed(f"{names[0]} is missing")


def group_size(settings: Settings, *names: str) -> int | None:
    """Return the inputs that share a scale; None for all of a row, which files write as -1."""
    if all(settings.get(name) is None for name in names):
        return None
    size = integer(settings, *names)
    if size < -1:
        raise malformed(f"{names[0]} is {size}")
    return size if size > 0 else None


def one_of(value: object, name: str, valid: tuple[object, ...]) -> Any:
    if value not in valid:
        raise unsupported(f"{name} {value!r}")
    return value


def skip_rules(patterns: list[str]) -> tuple[Rule, ...]:
    return tuple(Rule(pattern, "skip", None) for pattern in patterns)


def named_rules(
    patterns: list[str], weight_format: WeightFormat | None, name: str
) -> tuple[Rule, ...]:
    """Make rules of compressed-tensors' patterns: names, or regular expressions after `re:`."""
    return tuple(named_rule(pattern, weight_format, name) for pattern in patterns)


def named_rule(pattern: str, weight_format: WeightFormat | None, name: str) -> Rule:
    if not pattern.startswith("re:"):
        return Rule(pattern, "name", weight_format)
    return regex_rule(pattern.removeprefix("re:"), weight_format, name)


def regex_rule(pattern: str, weight_format: WeightFormat | None, name: str) -> Rule:
    try:
        re.compile(pattern)
    except re.error as error:
        raise malformed(f"{name} has the pattern {pattern!r}: {error}") from None
    return Rule(pattern, "regex", weight_format)
