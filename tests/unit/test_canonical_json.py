"""The numbers are from RFC 8785, appendix B; the other cases follow section 3."""

from __future__ import annotations

import json
import struct
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.base.canonical_json import canonical_json

APPENDIX_B = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**53), max_value=2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('aé€😀\n"\\'), inner),
    max_leaves=5,
)


@pytest.mark.parametrize(("bits", "text"), APPENDIX_B.items())
def test_numbers_are_written_as_ecmascript_does(bits: str, text: str) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(value) == text.encode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (16.0, "16"),
        (16, "16"),
        (0.1, "0.1"),
        (1e20, "1" + "0" * 20),
    ],
)
def test_the_point_and_the_exponent_stand_where_they_should(value: float, text: str) -> None:
    assert canonical_json(value) == text.encode()


def test_texts_are_escaped_as_little_as_json_allows() -> None:
    text = "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"\u007f/"
    assert canonical_json(text) == '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"\u007f/"'.encode()


def test_names_are_sorted_by_their_utf16_units() -> None:
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    order = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    written = canonical_json(dict.fromkeys(names, 0))
    assert list(json.loads(written)) == order


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53 + 1, -(2**53) - 1, "\ud800"])
def test_what_has_no_exact_form_is_an_error(value: object) -> None:
    with pytest.raises(ValueError):
        canonical_json(value)


@pytest.mark.parametrize("value", [b"x", {1: 2}, {3}])
def test_what_is_not_json_is_an_error(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_json(value)


@settings(max_examples=50)
@given(JSON)
def test_reading_it_back_gives_the_value(value: object) -> None:
    # JSON readers other than Python's parse every number as a double.
    assert json.loads(canonical_json(value), parse_int=float) == value


@given(st.dictionaries(st.text("aé€😀", max_size=3), st.integers(0, 9), max_size=4), st.randoms())
def test_the_order_of_names_does_not_matter(value: dict[str, int], random: Random) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)
