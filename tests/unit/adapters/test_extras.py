"""Places of the parts of an adapter beside low rank."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.packed.extras import (
    ALIGN_ELEMENTS,
    NO_EXTRAS,
    ExtraKind,
    ExtraSpec,
    plan_extras,
    specs_of,
)
from loramux.errors import DoesNotFit

PAGE = 1024


@st.composite
def parts(draw: st.DrawFn) -> list[ExtraSpec]:
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 200), st.integers(1, PAGE)), min_size=1, max_size=12)
    )
    return [
        ExtraSpec(layer, "q_proj", ExtraKind.WEIGHT, num_rows, width)
        for layer, (num_rows, width) in enumerate(shapes)
    ]


@given(parts(), st.integers(0, 3 * PAGE))
def test_rows_do_not_overlap_and_do_not_cross_pages(
    specs: list[ExtraSpec], num_elements: int
) -> None:
    layout = plan_extras(specs, num_elements=num_elements, page_width=PAGE)
    owners: dict[int, str] = {}
    for spec in specs:
        place = layout.places[spec.key]
        pieces = list(place.pieces(PAGE))
        assert sum(count for _, count, _ in pieces) == spec.num_rows
        for _, count, offset in pieces:
            assert offset % ALIGN_ELEMENTS == 0
            assert offset // PAGE == (offset + count * spec.width - 1) // PAGE
            for element in range(offset, offset + count * spec.width):
                assert owners.setdefault(element, "weight") == "weight"
                owners[element] = "taken"
    gaps = [element for start, stop in layout.gaps for element in range(start, stop)]
    assert layout.start >= num_elements
    assert sorted([*owners, *gaps]) == list(range(layout.start, layout.end))
    assert layout.num_weights == len(owners)


def test_a_layout_is_made_again_from_its_key() -> None:
    specs = (
        ExtraSpec(0, "qkv", ExtraKind.GAIN, 1, 96),
        ExtraSpec(-1, "embed_tokens", ExtraKind.ROWS, 2, 32, (3, 70)),
    )
    layout = plan_extras(specs, num_elements=100, page_width=PAGE)
    key = json.loads(json.dumps(layout.key))
    assert plan_extras(specs_of(key), num_elements=100, page_width=PAGE) == layout


def test_no_parts_take_no_page() -> None:
    assert plan_extras((), num_elements=100, page_width=PAGE) is NO_EXTRAS


def test_a_row_larger_than_a_page_is_refused() -> None:
    spec = ExtraSpec(0, "down_proj", ExtraKind.WEIGHT, 4, PAGE + 1)
    with pytest.raises(DoesNotFit, match="larger block size"):
        plan_extras([spec], num_elements=0, page_width=PAGE)
