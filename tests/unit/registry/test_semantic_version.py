from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.errors import InvalidRequest
from loramux.registry.names import (
    FIRST_VERSION,
    SemanticVersion,
    highest,
    is_version,
    parse_version,
)

# The example of semver.org §11, lowest first.
IN_ORDER = [
    "1.0.0-alpha",
    "1.0.0-alpha.1",
    "1.0.0-alpha.beta",
    "1.0.0-beta",
    "1.0.0-beta.2",
    "1.0.0-beta.11",
    "1.0.0-rc.1",
    "1.0.0",
    "1.0.1-0",
    "1.2.0",
    "1.10.0",
    "2.0.0",
]
WORDS = st.from_regex(r"\A(?:0|[1-9][0-9]{0,3}|[a-z][0-9a-z-]{0,5})\Z")
VERSIONS = st.builds(
    SemanticVersion,
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.lists(WORDS, max_size=3).map(tuple),
)


def test_order_is_that_of_the_specification_not_of_the_text() -> None:
    versions = [parse_version(text) for text in IN_ORDER]
    backwards = versions[::-1]
    assert sorted(backwards) == versions


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "1.2", "v1.2.3", "1.2.3.4", "01.2.3", "1.2.3-", "1.2.3-01", "1.2.3-a..b"),
        *("1.2.3+build", " 1.2.3", "1.2.3\n", "1.2.x", "-1.2.3", "1.2.3-é", "١.٢.٣"),
        *("1.2.3-" + "a" * 64, "9999999999.0.0"),
    ],
)
def test_what_is_no_version_is_refused(text: str) -> None:
    assert not is_version(text)
    with pytest.raises(InvalidRequest, match="not a version"):
        parse_version(text)


@given(VERSIONS)
def test_a_version_survives_its_text(version: SemanticVersion) -> None:
    assert parse_version(str(version)) == version


@given(VERSIONS)
def test_the_next_version_is_a_higher_release(version: SemanticVersion) -> None:
    assert version.next_patch() > version
    assert not version.next_patch().prerelease


@given(st.lists(VERSIONS, max_size=6))
def test_the_highest_is_a_release_if_there_is_one(versions: list[SemanticVersion]) -> None:
    found = highest(versions)
    releases = [version for version in versions if not version.prerelease]
    assert found == max(releases or versions, default=None)
    assert found is None or not (releases and found.prerelease)


def test_first_version_is_a_release() -> None:
    assert str(FIRST_VERSION) == "1.0.0"
