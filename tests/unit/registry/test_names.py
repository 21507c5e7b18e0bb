from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.identity import CID_PREFIX
from loramux.errors import InvalidRequest
from loramux.registry.names import (
    FIRST_VERSION,
    AdapterName,
    CidReference,
    NameReference,
    SemanticVersion,
    check_alias,
    check_name,
    highest,
    is_version,
    parse_name_reference,
    parse_push_reference,
    parse_reference,
    parse_version,
)

REFUND = AdapterName("alice", "refund-flagger")
DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sql", NameReference(AdapterName("home", "sql"))),
        ("alice/refund-flagger", NameReference(REFUND)),
        (
            "alice/refund-flagger@1.4.2",
            NameReference(REFUND, version=SemanticVersion(1, 4, 2)),
        ),
        ("alice/refund-flagger@prod", NameReference(REFUND, alias="prod")),
        ("sql@latest", NameReference(AdapterName("home", "sql"), alias="latest")),
        ("Org_1/Llama-3.1.sql", NameReference(AdapterName("Org_1", "Llama-3.1.sql"))),
        (CID_PREFIX + DIGITS, CidReference(DIGITS)),
        (CID_PREFIX + DIGITS[:12], CidReference(DIGITS[:12])),
        (DIGITS[:12], CidReference(DIGITS[:12])),
        (DIGITS[:11], NameReference(AdapterName("home", DIGITS[:11]))),
    ],
)
def test_each_form_of_a_reference(text: str, expected: object) -> None:
    assert parse_reference(text, home_tenant="home") == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", "a/", "/a", "a/b/c", "../etc", "a/..", ".", "a..b", "a/./b", "-a", "a-", "_a"),
        *("a b", "a\n", "a\0b", "a%2fb", "a\\b", "~", "$HOME", "a;b", "ä", "а", "a/b@", "@prod"),
        *("a@b@c", "a/b@1.2", "a/b@v1.2.3", "a/b@Prod", "a/b@-x", "a/b@x--y", "a/b@1.2.3+x"),
        *("a" * 129, "t/" + "a" * 129, "x" * 600, DIGITS[:12] + "/a", "a/" + DIGITS),
        *(CID_PREFIX, CID_PREFIX + DIGITS[:11], CID_PREFIX + DIGITS + "0", CID_PREFIX + "F" * 64),
        *("cidv1:sha512:" + DIGITS, "https://example.org/x", "hf:org/repo"),
    ],
)
def test_invalid_names_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_reference(text)
    assert len(str(caught.value)) > 20


@given(st.text(max_size=40))
def test_accepted_references_round_trip(text: str) -> None:
    try:
        parsed = parse_reference(text)
    except InvalidRequest:
        return
    assert text.isascii() and ".." not in text and not set(text) & set(" \\\n\0'\"`$;|&<>*?~%")
    assert parse_reference(str(parsed)) == parsed


@given(st.from_regex(r"\A[a-z0-9@./-]{1,12}\Z"))
def test_after_the_at_a_text_is_a_version_or_an_alias_never_both(text: str) -> None:
    try:
        parsed = parse_name_reference(f"a/b@{text}")
    except InvalidRequest:
        return
    assert (parsed.version is None) != (parsed.alias is None)
    assert is_version(text) == (parsed.version is not None)


@pytest.mark.parametrize("alias", ["latest", "", "Prod", "1x", "a b", "a" * 64, "1.2.3", "x-"])
def test_aliases_that_cannot_be_moved(alias: str) -> None:
    with pytest.raises(InvalidRequest):
        check_alias(alias)


@pytest.mark.parametrize("alias", ["prod", "canary-2", "a" * 63])
def test_aliases_that_can(alias: str) -> None:
    assert check_alias(alias) == alias


def test_a_name_that_looks_like_a_content_id_could_shadow_one() -> None:
    with pytest.raises(InvalidRequest, match="content id"):
        check_name("deadbeefcafe", "adapter")
    assert check_name("deadbeefcafe-2", "adapter") == "deadbeefcafe-2"


def test_a_push_to_an_alias_is_refused() -> None:
    assert parse_push_reference("a/b@1.0.0").version == SemanticVersion(1, 0, 0)
    assert parse_push_reference("b", home_tenant="a") == NameReference(AdapterName("a", "b"))
    with pytest.raises(InvalidRequest, match="ends with an alias"):
        parse_push_reference("a/b@prod")


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
def test_invalid_versions_are_refused(text: str) -> None:
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
