from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.identity import CID_PREFIX
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.registry.records import Content, Resolved, Target
from loramux.registry.registry import Registry
from loramux.registry.resolve import check_targets, choose
from tests.registry_factory import make_cid, make_content


def push(registry: Registry, reference: str, seed: object) -> None:
    registry.push(reference, make_content(seed))


def push_digits(registry: Registry, reference: str, digits: str) -> str:
    cid = CID_PREFIX + digits.ljust(64, "0")
    registry.push(reference, Content(cid=cid, manifest={}, size_bytes=1))
    return cid


def test_a_version_means_its_bytes_and_no_alias(registry: Registry) -> None:
    push(registry, "alice/sql@1.4.2", 1)
    push(registry, "alice/sql@1.5.0", 2)
    assert registry.resolve("alice/sql@1.4.2") == Resolved(
        cid=make_cid(1), tenant="alice", name="sql", version="1.4.2", base_model="tiny"
    )


def test_a_name_alone_is_latest_until_something_is_in_production(registry: Registry) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    push(registry, "alice/sql@2.0.0", 2)
    found = registry.resolve("alice/sql")
    assert (found.version, found.alias) == ("2.0.0", "latest")
    registry.promote("alice/sql", "1.0.0", alias="prod")
    found = registry.resolve("alice/sql")
    assert (found.version, found.alias) == ("1.0.0", "prod")
    # A later push is not served without a promotion.
    push(registry, "alice/sql@3.0.0", 3)
    assert registry.resolve("alice/sql").version == "1.0.0"
    assert registry.resolve("alice/sql@latest").version == "3.0.0"


def test_a_hotfix_of_an_older_line_does_not_become_latest(registry: Registry) -> None:
    for version in ("1.3.0", "1.4.0", "1.3.1", "1.5.0-rc.1"):
        push(registry, f"alice/sql@{version}", version)
    assert registry.resolve("alice/sql@latest").version == "1.4.0"


def test_a_plain_name_belongs_to_the_home_tenant(registry: Registry) -> None:
    push(registry, "sql@1.0.0", 1)
    push(registry, "bob/sql@1.0.0", 2)
    assert registry.resolve("sql").tenant == "default"
    assert registry.resolve("sql", home_tenant="bob").cid == make_cid(2)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("alice/none", "No adapter alice/none"),
        ("alice/sql@9.9.9", r"no version 9\.9\.9; its latest is 1\.0\.0"),
        ("alice/sql@canary", "no alias canary; it has prod, latest"),
        (make_cid("nothing"), "No version in the registry"),
    ],
)
def test_an_unknown_reference_lists_the_known_ones(
    registry: Registry, reference: str, reason: str
) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    registry.promote("alice/sql", "1.0.0", alias="prod")
    with pytest.raises(AdapterNotFound, match=reason):
        registry.resolve(reference)


def test_a_split_sends_a_key_to_the_same_side_always(registry: Registry) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    push(registry, "alice/sql@2.0.0", 2)
    registry.split("alice/sql", {"1.0.0": 50, "2.0.0": 50}, alias="prod")
    sides = {registry.resolve("alice/sql", sticky_key="user-7").version for _ in range(5)}
    assert len(sides) == 1
    by_key = {registry.resolve("alice/sql", sticky_key=str(i)).version for i in range(20)}
    by_chance = {registry.resolve("alice/sql").version for _ in range(60)}
    assert by_key == by_chance == {"1.0.0", "2.0.0"}


def test_a_content_id_or_the_start_of_one(registry: Registry) -> None:
    cid = push_digits(registry, "a/one@1.0.0", "aaaaaaaaaaaa1")
    push_digits(registry, "a/two@1.0.0", "aaaaaaaaaaaa2")
    assert registry.resolve(cid) == Resolved(cid=cid)
    assert registry.resolve("cidv1:sha256:aaaaaaaaaaaa1") == Resolved(cid=cid)
    assert registry.resolve("aaaaaaaaaaaa1") == Resolved(cid=cid)
    with pytest.raises(InvalidRequest, match="Several content ids"):
        registry.resolve("cidv1:sha256:aaaaaaaaaaaa")


def test_two_names_of_one_content_do_not_make_its_start_ambiguous(registry: Registry) -> None:
    cid = push_digits(registry, "a/one@1.0.0", "aaaaaaaaaaaa1")
    push_digits(registry, "b/one@1.0.0", "aaaaaaaaaaaa1")
    assert registry.resolve("aaaaaaaaaaaa").cid == cid


def test_content_without_versions_is_not_found(registry: Registry) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    push(registry, "bob/sql@1.0.0", 1)
    registry.remove("alice/sql")
    assert registry.resolve(make_cid(1)).cid == make_cid(1)
    registry.remove("bob/sql@1.0.0")
    with pytest.raises(AdapterNotFound):
        registry.resolve(make_cid(1))


WEIGHTS = st.dictionaries(
    st.sampled_from(["1.0.0", "1.1.0", "2.0.0", "2.0.1"]), st.integers(1, 1000), min_size=1
)
KEYS = st.text(max_size=20)


@given(WEIGHTS, KEYS, st.randoms())
def test_a_key_belongs_to_one_target_whatever_their_order(
    weights: dict[str, int], key: str, random: object
) -> None:
    targets = list(weights.items())
    expected = choose(targets, salt="a/b", key=key)
    random.shuffle(targets)  # type: ignore[attr-defined]
    assert choose(targets, salt="a/b", key=key) == expected
    assert expected in weights


@given(WEIGHTS, KEYS, st.integers(1, 1000))
def test_a_change_of_weight_moves_keys_to_or_from_that_target_only(
    weights: dict[str, int], key: str, weight: int
) -> None:
    changed = min(weights)
    before = choose(weights.items(), salt="a/b", key=key)
    after = choose({**weights, changed: weight}.items(), salt="a/b", key=key)
    if before != after:
        assert changed == (after if weight > weights[changed] else before)


@given(KEYS)
def test_more_weight_never_loses_a_key(key: str) -> None:
    """A canary that grows from 1 % to 99 % keeps every user it ever had."""
    sides = [
        choose([("1.0.0", 100 - share), ("2.0.0", share)], salt="a/b", key=key)
        for share in range(1, 100, 7)
    ]
    assert sides == sorted(sides)


def test_shares_are_those_of_the_weights() -> None:
    targets = [("1.0.0", 90), ("2.0.0", 10)]
    counts = Counter(choose(targets, salt="a/b", key=f"user-{i}") for i in range(5000))
    # Five standard deviations of a binomial with p = 0.1 are 106.
    assert abs(counts["2.0.0"] - 500) < 110


def test_splits_of_two_adapters_are_independent() -> None:
    targets = [("1.0.0", 50), ("2.0.0", 50)]
    same = sum(
        choose(targets, salt="a/b", key=str(i)) == choose(targets, salt="a/c", key=str(i))
        for i in range(1000)
    )
    assert 400 < same < 600


def test_the_choice_of_known_keys_never_changes() -> None:
    """Servers of different releases that share a registry must agree."""
    targets = [("1.0.0", 50), ("2.0.0", 50)]
    chosen = "".join(choose(targets, salt="a/b", key=str(i))[0] for i in range(16))
    assert chosen == "1211122222122121"


@pytest.mark.parametrize("weight", [0, -1, 1_000_001, 0.5, True, "90"])
def test_weights_are_positive_integers(weight: object) -> None:
    with pytest.raises(InvalidRequest, match=r"weight of 1\.0\.0"):
        check_targets([("1.0.0", weight)])  # type: ignore[list-item]


@pytest.mark.parametrize("count", [0, 17])
def test_a_split_has_a_sensible_number_of_versions(count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"not {count}"):
        check_targets([(f"1.0.{i}", 1) for i in range(count)])


def test_targets_are_kept_in_one_order() -> None:
    assert check_targets([("2.0.0", 10), ("1.0.0", 90)]) == (
        Target("1.0.0", 90),
        Target("2.0.0", 10),
    )
