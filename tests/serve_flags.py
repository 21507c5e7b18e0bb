"""What `loramux serve` makes of the flags of a container."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loramux.cli.serve import one_value_per_flag
from loramux.config.fields import Kind
from loramux.config.file import load_serve_config
from loramux.config.serve import SETTINGS, ServeConfig

_NUMBERS: dict[Kind, Callable[[Any], Any]] = {Kind.COUNT: int, Kind.SECONDS: float}


def served(flags: list[str]) -> ServeConfig:
    """Return the settings that `loramux serve` reads from these flags."""
    given: dict[str, Any] = {}
    words = iter(one_value_per_flag(flags))
    for word in words:
        setting = SETTINGS[word.removeprefix("--").replace("-", "_")]
        value: Any = True if setting.kind is Kind.SWITCH else next(words)
        if setting.kind is Kind.LORA_MODULES:
            given.setdefault(setting.name, []).append(value)
        else:
            given[setting.name] = _NUMBERS.get(setting.kind, lambda text: text)(value)
    return load_serve_config(given, None)
