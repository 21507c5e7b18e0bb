from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.errors import InvalidRequest
from loramux.types.composition import (
    MAX_ADAPTERS,
    Term,
    check_count,
    check_weights,
    compose,
    find_repeated,
    parse_sum,
    sum_text,
)

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./@:-]{0,8}", fullmatch=True)
weights = st.sampled_from([1.0, -1.0, 0.0, 0.3, -2.5, 1e-3, 25.0])


@given(terms=st.lists(st.tuples(names, weights), min_size=2, max_size=8))
def test_the_text_of_a_sum_has_its_terms(terms: list[Term]) -> None:
    assert parse_sum(sum_text(terms)) == terms


@pytest.mark.parametrize("text", ["a", " a ", "", "a+", "+a", "a++b", "0.5*", "0.5*+b", "nan*a"])
def test_a_plain_name_and_a_sum_without_a_name_are_no_sum(text: str) -> None:
    assert parse_sum(text) is None


def test_a_weight_may_have_a_sign_and_an_exponent() -> None:
    assert parse_sum("1e+2*a + -.5 * b+c*2") == [("a", 100.0), ("b", -0.5), ("c*2", 1.0)]
    assert parse_sum("2*a") == [("a", 2.0)]
    assert parse_sum("1*a") == [("a", 1.0)]


def test_a_selection_is_sorted_and_without_zeros() -> None:
    parts = [("c", 1), ("a", -0.0), ("b", -2.0)]
    assert compose(parts) == compose(parts[::-1]) == (("b", -2.0), ("c", 1.0))


def test_the_first_repetition_is_found() -> None:
    assert find_repeated(["a", "b", "c"]) is None
    assert find_repeated(["a", "b", "c", "b", "a"]) == (1, 3)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 100.5])
def test_weights_have_limits(weight: float) -> None:
    check_weights([100, -100, 0], param="w")
    with pytest.raises(InvalidRequest, match="must be in"):
        check_weights([1, weight], param="w")


def test_the_number_of_adapters_has_a_limit() -> None:
    check_count(MAX_ADAPTERS, param="adapters")
    with pytest.raises(InvalidRequest, match="up to 8"):
        check_count(MAX_ADAPTERS + 1, param="adapters")
