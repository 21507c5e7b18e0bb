from __future__ import annotations

from typing import Any

import pytest

from loramux.errors import UnsupportedModel
from loramux.models.rope import RopeConfig, parse_layer_type_rope, parse_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**settings: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 131_072, **settings}


def test_old_and_new_spelling_give_the_same_rope() -> None:
    old = parse_rope(config(rope_theta=500_000.0, rope_scaling=LLAMA3))
    new = parse_rope(config(rope_parameters={"rope_theta": 500_000.0, **LLAMA3}))
    assert old == new
    assert (old.rope_type, old.theta, old.original_max_position) == ("llama3", 500_000.0, 8192)


def test_the_oldest_spelling_of_the_type_is_read() -> None:
    rope = parse_rope(config(rope_scaling={"type": "linear", "factor": 2.0}))
    assert (rope.rope_type, rope.factor) == ("linear", 2.0)


def test_nothing_said_is_the_plain_rope() -> None:
    assert parse_rope(config()) == RopeConfig(original_max_position=131_072)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "su"])
def test_unknown_type_is_refused_by_name(rope_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{rope_type}'.*llama3"):
        parse_rope(config(rope_scaling={"rope_type": rope_type, "factor": 2.0}))


def test_missing_setting_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="high_freq_factor"):
        parse_rope(config(rope_scaling={**LLAMA3, "high_freq_factor": None}))


@pytest.mark.parametrize(
    "settings",
    [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}],
    ids=["old", "new"],
)
def test_partly_rotated_heads_are_refused_not_rotated_wholly(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        parse_rope(config(**settings))


def test_layer_types_keep_their_own_theta_in_both_spellings() -> None:
    old = config(
        rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"type": "linear", "factor": 8}
    )
    new = config(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    )
    for written in (old, new):
        full = parse_layer_type_rope(
            written, layer_type="full_attention", theta_key="rope_theta", theta=5.0
        )
        local = parse_layer_type_rope(
            written, layer_type="sliding_attention", theta_key="rope_local_base_freq", theta=5.0
        )
        assert (full.rope_type, full.theta, full.factor) == ("linear", 1e6, 8)
        assert (local.rope_type, local.theta) == ("default", 1e4)
