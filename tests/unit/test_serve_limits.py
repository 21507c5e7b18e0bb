"""Limits by themselves; the keys that they belong to are in test_serve_file.py."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.config.fields import LoraModule
from loramux.config.limits import AT_LEAST_ONE, limits_of
from loramux.config.serve import ServeConfig
from loramux.errors import InvalidRequest


def test_the_defaults_are_possible() -> None:
    assert all(allowed for _, allowed, _ in limits_of(ServeConfig()))


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_a_count_of_nothing_is_refused_by_its_flag(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidRequest, match=f"--{name.replace('_', '-')} must be 1 or more"):
        ServeConfig(**values)


def test_one_name_cannot_mean_two_models() -> None:
    with pytest.raises(InvalidRequest, match="Two models would be called 'a'"):
        ServeConfig(served_model_name=("a",), lora_modules=(LoraModule("a", "folder"),))
