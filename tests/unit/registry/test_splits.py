from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.errors import InvalidRequest
from loramux.registry.records import Target
from loramux.registry.resolve import check_targets, choose

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


def test_two_adapters_do_not_try_new_versions_on_the_same_users() -> None:
    targets = [("1.0.0", 50), ("2.0.0", 50)]
    same = sum(
        choose(targets, salt="a/b", key=str(i)) == choose(targets, salt="a/c", key=str(i))
        for i in range(1000)
    )
    assert 400 < same < 600


def test_the_choice_is_part_of_the_protocol_and_never_changes() -> None:
    """Servers of different versions share one registry: they must agree."""
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
