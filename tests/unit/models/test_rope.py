from __future__ import annotations

import math
from typing import Any

import pytest

from loramux.errors import UnsupportedModel
from loramux.models.rope import RopeConfig, head_order, parse_layer_type_rope, parse_rope
from loramux.types.model import RowMap

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


@pytest.mark.parametrize("rope_type", ["dynamic", "proportional"])
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
def test_the_rotated_part_of_heads_is_read(settings: dict[str, Any]) -> None:
    rope = parse_rope(config(**settings))
    assert rope.num_rotated(16) == 8
    assert head_order(rope, 16) == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)


def test_whole_heads_in_halves_keep_their_order_and_pairs_do_not() -> None:
    assert head_order(parse_rope(config()), 16) is None
    pairs = parse_rope(config(), rotates_pairs=True)
    assert head_order(pairs, 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    row_map = RowMap(2, (0, 2, 1, 3))
    assert row_map.rows(10) == [0, 2, 1, 3, 4, 6, 5, 7, 8, 9]
    assert [row_map.rows(8)[row] for row in row_map.inverse().rows(8)] == list(range(8))


@pytest.mark.parametrize("rope_type", ["longrope", "su"])
def test_the_served_context_decides_between_the_factors_of_longrope(rope_type: str) -> None:
    settings = config(
        original_max_position_embeddings=4096,
        rope_scaling={"type": rope_type, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]},
    )
    assert parse_rope(settings, max_model_len=4096).factors == (1.0, 2.0)
    rope = parse_rope(settings, max_model_len=4097)
    assert rope.factors == parse_rope(settings).factors == (3.0, 4.0)
    assert rope.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)


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
