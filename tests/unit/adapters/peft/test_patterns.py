from __future__ import annotations

import time

import pytest

from loramux.adapters.peft import patterns
from loramux.adapters.peft.patterns import ENDLESS, MAX_STEPS_HERE, first_matches, worst_steps
from loramux.errors import AdapterRefused

KEYS = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(32) for name in "qkvo"]
LONGEST = max(map(len, KEYS))
# Written by a training tool for vision models.
GENERATED = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)


def runs_here(pattern: str) -> bool:
    return worst_steps(pattern, LONGEST) * len(KEYS) <= MAX_STEPS_HERE


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r"model\.layers\.(0|1|2)\.self_attn\.(q|v)_proj",
        r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
        r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
        r"(.*\.)?(model.layers.0.self_attn.q_proj)$",
    ],
)
def test_common_patterns_are_matched_in_the_process(pattern: str) -> None:
    assert runs_here(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(?:a|a)*b",
        "(?x)(a+) +b",
        "(?sx:(a+) # why\n +)b",
        "(.{1,9}){9}b",
        ".*" * 12 + "b",
        "(m|m)" * 40,
        r"\(?" * 60,
        ".?" * 60,
    ],
)
def test_what_may_backtrack_for_long_is_not(pattern: str) -> None:
    assert not runs_here(pattern)


def test_an_escaped_repetition_counts_nothing() -> None:
    assert worst_steps(r"a\*b\+c\?d\{", LONGEST) == 1
    assert worst_steps("(a)*", LONGEST) == ENDLESS


def test_a_long_harmless_pattern_is_matched_in_a_child() -> None:
    assert not runs_here(GENERATED)
    hits = first_matches("target_modules", [GENERATED], KEYS, whole=True)
    assert hits == [(0, None)] * len(KEYS)


def test_a_hostile_pattern_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_CHILD_SECONDS", 1.0)
    with pytest.raises(AdapterRefused, match="target_modules") as refused:
        first_matches("target_modules", ["(?:[a-z._0-9]+)+!"], KEYS, whole=True)
    assert refused.value.code == "bad_pattern"


def test_the_template_is_filled() -> None:
    hits = first_matches("rank_pattern", ["q_proj", "proj"], KEYS[:2], template=r"(.*\.)?({})$")
    assert hits == [(0, None), None]


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "(?P<a>x)(?P<a>x)", "(" * 4000])
def test_a_broken_pattern_is_refused_with_its_field(pattern: str) -> None:
    with pytest.raises(AdapterRefused, match="rank_pattern") as refused:
        first_matches("rank_pattern", [pattern], KEYS)
    assert refused.value.code == "bad_pattern"


@pytest.mark.parametrize("wide", [r"[\0-\U0010ffff]", r"(?i)[\0-\uffff]", "[a-\uffff]"])
def test_patterns_that_take_long_to_compile_are_refused_before(wide: str) -> None:
    """A config of 20 KB took 19 seconds: each of these classes takes about 10 ms."""
    hostile = [f"{wide}{i}" for i in range(1000)]
    began = time.monotonic()
    with pytest.raises(AdapterRefused, match="not ASCII") as refused:
        first_matches("rank_pattern", hostile, KEYS)
    assert refused.value.code == "bad_pattern" and time.monotonic() - began < 1


@pytest.mark.parametrize("many", [["[a]" * 1000] * 3, ["a" * 4000] * 33])
def test_many_classes_and_characters_are_refused(many: list[str]) -> None:
    with pytest.raises(AdapterRefused, match="at most 131072 and 2048"):
        first_matches("rank_pattern", many, KEYS)


@pytest.mark.parametrize("many", [["a"] * 4097, ["a" * 4097]])
def test_too_much_to_match_is_refused(many: list[str]) -> None:
    with pytest.raises(AdapterRefused, match="rank_pattern"):
        first_matches("rank_pattern", many, KEYS)


def test_no_pattern_matches_nothing() -> None:
    assert first_matches("rank_pattern", [], KEYS) == [None] * len(KEYS)
