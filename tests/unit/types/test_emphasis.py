"""A1111's brackets in prompts."""

from __future__ import annotations

import time

import pytest

from loramux.errors import InvalidRequest
from loramux.types.emphasis import Fragment, parse_emphasis, read_emphasis

UP, DOWN = 1.1, 1 / 1.1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a fox", [("a fox", 1)]),
        ("", [("", 1)]),
        ("a (red) fox", [("a ", 1), ("red", UP), (" fox", 1)]),
        ("a ((red)) fox", [("a ", 1), ("red", UP * UP), (" fox", 1)]),
        ("a [red] fox", [("a ", 1), ("red", DOWN), (" fox", 1)]),
        ("a (red:1.3) fox", [("a ", 1), ("red", 1.3), (" fox", 1)]),
        ("(red: 0.5 )", [("red", 0.5)]),
        ("(a (red:1.5) fox:2)", [("a ", 2), ("red", 3), (" fox", 2)]),
        ("(a [red] fox)", [("a ", UP), ("red", UP * DOWN), (" fox", UP)]),
        (r"a \(red\) \[fox\] \\", [(r"a (red) [fox] \ "[:-1], 1)]),
        ("a (red fox", [("a ", 1), ("red fox", UP)]),
        ("a [red fox", [("a ", 1), ("red fox", DOWN)]),
        ("a red) fox: 3", [("a red) fox: 3", 1)]),
        ("12:30:1.5) x", [("12:30:1.5) x", 1)]),
        ("(a)(b)", [("ab", UP)]),
    ],
)
def test_brackets_weigh_their_words(prompt, expected):
    found = parse_emphasis(prompt)
    assert [one.text for one in found] == [text for text, _ in expected]
    assert [one.weight for one in found] == pytest.approx([weight for _, weight in expected])


def test_hostile_prompts_take_no_time():
    for prompt in ("(" * 10**5, "(x:" + "1" * 10**5, ":" * 10**5, "[" * 90 + "a|" * 10**5):
        began = time.process_time()
        try:
            assert read_emphasis(prompt, weighs_words=True, param="prompt")
        except InvalidRequest as error:
            assert "brackets are open" in str(error)
        assert time.process_time() - began < 60, "a regular expression ran away"


def test_what_is_not_served_is_refused_by_name():
    for prompt in ("a [b:c:0.5]", "[b:3]", "[b|c]", "a AND b", "a BREAK b", "(x:1000)"):
        with pytest.raises(InvalidRequest):
            read_emphasis(prompt, weighs_words=True, param="prompt")
    with pytest.raises(InvalidRequest, match="by this model: write 'fox' without brackets"):
        read_emphasis("a (fox)", weighs_words=False, param="prompt")
    plain = [Fragment("Band andBREAKfast [fox: red] and")]
    text = r"Band andBREAKfast \[fox: red\] and"
    assert read_emphasis(text, weighs_words=False, param="prompt") == plain
